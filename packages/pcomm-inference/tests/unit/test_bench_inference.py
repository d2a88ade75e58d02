"""`pcomm bench inference`: what is refused, what is measured, and the command from end to end."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from inference_bench import plain_llama
from inference_bench.command import command
from inference_bench.measure import BARE, NoModel, decoding_engine, time_bookkeeping
from inference_bench.plain_llama import PlainLlama, Shape
from pcomm.inference import Engine, Request, SamplingParams

SMALL = Shape("small", 2, 16, 4, 2, 8, 24, 32)


def run(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


def products(run: object, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], ...]]:
    """Shapes of all matrix products."""
    seen: list[tuple[tuple[int, ...], ...]] = []

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        seen.append((tuple(x.shape), tuple(weight.shape)))
        return torch.nn.functional.linear(x, weight)

    class Functions:
        def __getattr__(self, name: str) -> object:
            return linear if name == "linear" else getattr(F, name)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(plain_llama, "F", Functions())
        assert callable(run)
        run()
    return seen


def test_products_alone_are_those_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PlainLlama(SMALL, 64)
    engine = decoding_engine(model, SMALL.vocabulary, [5, 9, 2], 4)
    of_step = products(engine.step, monkeypatch)
    assert of_step == products(lambda: model.linears(3), monkeypatch)
    assert len(of_step) == 4 * SMALL.layers + 1
    engine.close()


def likeliest(model: PlainLlama, prompt: Sequence[int], **limits: int) -> list[tuple[int, float]]:
    """Twelve tokens, and their log-probabilities."""
    engine = Engine(
        model,
        vocabulary=SMALL.vocabulary,
        max_model_len=60,
        num_blocks=8,
        num_state_slots=2,
        **limits,
    )
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    engine.add(Request("one", tuple(prompt), params))
    found: list[tuple[int, float]] = []
    while engine.has_work:
        for output in engine.step():
            found += [(one.token_id, one.logprob) for one in output.logprobs]
    engine.close()
    return found


def test_the_model_is_the_llama_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="it has the model to compare with")
    model, prompt = PlainLlama(SMALL, 64, torch.float32), [31, 3, 3, 17, 5, 0, 9, 11, 30]
    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=SMALL.width,
            intermediate_size=SMALL.mlp_width,
            num_hidden_layers=SMALL.layers,
            num_attention_heads=SMALL.heads,
            num_key_value_heads=SMALL.kv_heads,
            head_dim=SMALL.head_dim,
            vocab_size=SMALL.vocabulary,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    )
    weights = {"model.embed_tokens.weight": model.table_VD, "model.norm.weight": model.norm_D}
    for index, (qkv, out, gate_up, down) in enumerate(model.layers):
        counts = [n * SMALL.head_dim for n in (SMALL.heads, SMALL.kv_heads, SMALL.kv_heads)]
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        parts = dict(zip(names, qkv.split(counts), strict=True))
        parts |= dict(zip(("mlp.gate_proj", "mlp.up_proj"), gate_up.chunk(2), strict=True))
        parts |= {"self_attn.o_proj": out, "mlp.down_proj": down}
        parts |= {"input_layernorm": model.norm_D, "post_attention_layernorm": model.norm_D}
        weights |= {f"model.layers.{index}.{name}.weight": part for name, part in parts.items()}
    missing, unexpected = other.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    found = likeliest(model, prompt)
    assert len(found) == 12
    tokens = [*prompt, *(token for token, _ in found)]
    with torch.inference_mode():
        expected = other(torch.tensor([tokens[:-1]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
    ids = torch.tensor(tokens[len(prompt) :])
    assert ids.equal(expected.argmax(-1))
    # Two layers of sums of up to 24 products in fp32, of logits of size 1.
    actual = torch.tensor([logprob for _, logprob in found])
    torch.testing.assert_close(
        actual, expected[torch.arange(12), ids], rtol=0, atol=1e-5, check_dtype=False
    )
    assert [token for token, _ in likeliest(model, prompt, max_batch_tokens=4)] == ids.tolist()


@pytest.mark.parametrize("prompts", [[3], [512] * 8, [100, 2000, 300]])
def test_every_request_decodes_from_the_first_step_that_counts(prompts: list[int]) -> None:
    engine = decoding_engine(NoModel(), 64, prompts, 9)
    for _ in range(9):
        outputs = engine.step()
        assert [len(output.token_ids) for output in outputs] == [1] * len(prompts)
        assert all(output.finish_reason is None for output in outputs)
    engine.close()


def test_bookkeeping_is_what_the_clock_says() -> None:
    ticks = count()
    timing, phases = time_bookkeeping(2, rounds=7, clock=lambda: next(ticks) * 1e-6)
    assert timing.rounds_us == pytest.approx([1.0] * 7)
    assert {"schedule", "sample"} <= set(phases)


def test_a_quick_run_writes_its_rows_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="it draws the picture, and is no requirement")
    rows, image = tmp_path / "inference.csv", tmp_path / "new" / "decoding.png"
    words = ["--quick", "--streams", "2", "--contexts", "16", "--rows", "3"]
    assert run([*words, "--csv", str(rows), "--plot", str(image)]) == 0
    assert not dist.is_initialized()
    with rows.open(newline="") as file:
        found = {(row["case"], row["unit"]): row for row in csv.DictReader(file)}
    assert {row["benchmark"] for row in found.values()} == {"inference"}
    assert {(f"{case}, more than {bare}", "us") for case, bare in BARE.items()} <= set(found)
    place = "tiny, threads 1, streams 2, context 64"
    step = found[f"step @ {place}", "ms"]
    assert step["ratio_to"] == f"linears alone @ {place}"
    tokens = float(found[f"tokens @ {place}", "tokens/s"]["value"])
    assert tokens == pytest.approx(2 / float(step["value"]) * 1e3, rel=0.01)
    assert ("step of 3 rows without a model", "us") in found
    for form in ("packed", "int8", "batch-invariant"):
        row = found[f"linears, {form} weights @ tiny, threads 1, rows 8", "ms"]
        assert row["ratio_to"] == "linears, F.linear @ tiny, threads 1, rows 8"
    assert image.read_bytes().startswith(b"\x89PNG")
