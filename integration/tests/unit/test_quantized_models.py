"""Models with int8 weights: against transformers, in memory, and as options."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from integration_support.huggingface_directories import write_directory, write_tokenizer
from integration_support.short_runs import tiny_run
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual
from pcomm.inference import SamplingParams
from pcomm.inference.layers import Int8Weight, quantize_int8
from pcomm.integration.commands import chat, generate, serve
from pcomm.integration.commands.llm_options import llm_options
from pcomm.integration.huggingface import load_model as load_directory
from pcomm.integration.llm import LLM, load_model, weight_form
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.parallelize import plan_sequences

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")

# Logits have a standard deviation of one. fp32 differs by 2e-4 where a small vector is normalised,
# which depends on where in memory tensors lie; rounded weights change logits by far more.
TOLERANCE = 1e-3
TEXTS = ["one two three four", "five six seven", "eight nine ten eleven twelve"]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def directory(folder: Path, family: str, **changes: object) -> nn.Module:
    model = write_directory(folder, family, **changes)
    write_tokenizer(folder, TEXTS)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    directory(folder, "llama")
    return folder


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        if isinstance(model, LanguageModel):
            return model(tokens, plan_sequences(model, (0, len(tokens))))
        return model(tokens.unsqueeze(0)).logits[0]


def _is_quantised(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight_product", None), Int8Weight)


def product_of(layer: nn.Module) -> Int8Weight:
    product = layer.weight_product
    assert isinstance(product, Int8Weight)
    return product


def round_linears(model: nn.Module) -> None:
    """Give transformers' model the weights that int8 numbers stand for."""
    # Routers and gates of experts are no linear layers of ours, nor are the experts.
    layers = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and "gate" not in n}
    layers |= {n: m for n, m in model.named_modules() if n.endswith("mlp.gate_proj")}
    layers |= {n: m for n, m in model.named_modules() if n.endswith("shared_expert.gate_proj")}
    for layer in layers.values():
        weight = layer.weight.detach()
        scale = (weight.double().abs().max(1, keepdim=True).values / 127).float()
        # In fp32, where a quotient may lie on the other side of the middle of two numbers.
        steps = (weight / scale).round()
        layer.weight = nn.Parameter((steps.double() * scale).float())


# A tied head with biases, a recurrent family, and gates, experts and recurrence together.
@pytest.mark.parametrize("family", ["llama", "qwen2", "mamba2", "qwen3_next"])
def test_logits_are_those_of_transformers_with_the_rounded_weights(family, tmp_path):
    theirs = directory(tmp_path, family)
    loaded = load_model(tmp_path, quantization="int8").model
    linears = [n for n, m in load_directory(tmp_path).named_modules() if hasattr(m, "layout")]
    linears = [name for name in linears if name != "embedding"]
    assert [n for n, m in loaded.named_modules() if _is_quantised(m)] == linears
    # Up to 16 rows, and above.
    few, many = (torch.arange(n) * 7 % 290 for n in (9, 33))
    before = logits(theirs, few)
    round_linears(theirs)
    for tokens in (few, many):
        assert (logits(loaded, tokens) - logits(theirs, tokens)).abs().max() <= TOLERANCE
    assert (before - logits(theirs, few)).abs().max() > 20 * TOLERANCE


def test_a_rank_quantises_its_own_rows(llama):
    whole, tokens = load_model(llama, quantization="int8").model, torch.arange(12)

    def mine(collectives: VirtualCollectives) -> LanguageModel:
        model = load_directory(llama, collectives=collectives)
        quantize_int8(model)
        return model

    parts = run_virtual(mine, 2)
    for name in ("qkv", "output"):
        place = f"blocks.0.mixer.{name}"
        own = [part.get_submodule(place).weight_product for part in parts]
        theirs = whole.get_submodule(place).weight_product
        # Rows that are split have the scales of the whole; of columns each rank has its own.
        dim = 0 if name == "qkv" else 1
        assert sum(one.numbers_OI.shape[dim] for one in own) == theirs.numbers_OI.shape[dim]
        largest = torch.stack([one.scales_O for one in own]).amax(0) if dim else None
        if largest is not None:
            assert torch.equal(largest, theirs.scales_O)

    def computed(collectives: VirtualCollectives) -> Tensor:
        model = mine(collectives)
        local = logits(model, tokens)
        return collectives.all_gather(local, dim=-1, sizes=model.vocabulary.sizes)

    exact = logits(load_directory(llama), tokens)
    error = (logits(whole, tokens) - exact).norm()
    for found in run_virtual(computed, 2):
        # Finer scales of the ranks make no larger errors, but for chance.
        assert 0 < (found - exact).norm() <= 1.2 * error


def test_texts_written_together_are_those_written_alone(llama):
    # Prompts of more rows than the kernel takes, and texts of fewer.
    prompts = [text * count for count, text in zip((1, 6, 3), TEXTS, strict=True)]
    with LLM(llama, quantization="int8", memory_bytes=2**21, speculative_tokens=2) as llm:
        together = llm.generate(prompts, GREEDY)
        for prompt, expected in zip(prompts, together, strict=True):
            assert llm.generate(prompt, GREEDY)[0].token_ids == expected.token_ids


def test_a_run_loses_little(tmp_path):
    folder = tiny_run(tmp_path, "GA")
    exact, found = load_model(folder), load_model(folder, quantization="int8")
    tokens = torch.tensor(exact.prompt_ids("word1 word2 word3 " * 40)[:200])
    theirs, ours = logits(exact.model, tokens), logits(found.model, tokens)
    losses = [F.cross_entropy(y[:-1], tokens[1:]) for y in (theirs, ours)]
    assert (losses[1] / losses[0] - 1).abs() <= 0.01
    assert (theirs.argmax(1) == ours.argmax(1)).float().mean() >= 0.95
    assert not torch.equal(theirs, ours)


def bytes_of(model: nn.Module) -> int:
    """Bytes of all that a model holds; memory that several tensors share counts once."""
    tensors = [one for one in (*model.parameters(), *model.buffers()) if not one.is_meta]
    held = [tensor.untyped_storage() for tensor in tensors]
    quantised = [product_of(one).nbytes for one in model.modules() if _is_quantised(one)]
    return sum({one.data_ptr(): one.nbytes() for one in held}.values()) + sum(quantised)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_weights_are_never_there_in_both_forms(family, tmp_path, monkeypatch):
    directory(tmp_path, family, dtype=torch.bfloat16)
    seen: list[int] = []
    replace = weight_form.quantize_int8

    def watched(model: nn.Module, **options: object) -> tuple[str, ...]:
        seen.append(bytes_of(model))
        return replace(model, **options)  # type: ignore[arg-type]

    exact = load_model(tmp_path).model
    monkeypatch.setattr(weight_form, "quantize_int8", watched)
    model = load_model(tmp_path, quantization="int8").model
    layers = [module for module in model.modules() if _is_quantised(module)]
    largest = max(2 * product_of(layer).numbers_OI.nbytes for layer in layers)
    assert len(seen) > len(layers)
    # Beside what is there in the end, at most the largest layer as it is read.
    assert max(seen) <= bytes_of(model) + largest < bytes_of(exact)


def test_what_cannot_be_quantised_is_refused_before_it_is_read(llama):
    with pytest.raises(ConfigError, match=r"'int4'(.|\n)*Known here: 'int8'|Did you mean 'int8'"):
        LLM(llama, quantization="int4")
    with pytest.raises(UnsupportedError, match="device cuda"):
        load_model(llama, quantization="int8", device="cuda")
    with pytest.raises(UnsupportedError, match="--dtype bfloat16, or dtype='bfloat16' in"):
        LLM(llama, quantization="int8", dtype="float16")


def test_commands_take_the_option(llama, capsys):
    words = [str(llama), "--quantization", "int8"]
    for command in (chat.command, serve.command):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        assert llm_options(parser.parse_args(words))["quantization"] == "int8"
        assert llm_options(parser.parse_args(words[:1]))["quantization"] is None
    parser = argparse.ArgumentParser()
    generate.command.add_arguments(parser)
    more = ["--json", "--temperature", "0", "--max-tokens", "4", "--prompt", "one two"]
    assert generate.command.run(parser.parse_args(words + more)) == 0
    found = json.loads(capsys.readouterr().out)["token_ids"]
    with LLM(llama, quantization="int8", memory_bytes=2**21) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        assert found == list(llm.generate("one two", params)[0].token_ids)
