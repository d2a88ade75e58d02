"""Rows of a run: means, its share of a peak, times of its parts, and the best checkpoint."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from integration_support.short_runs import run_words, tiny_config, write_words
from pcomm.core.errors import ConfigError
from pcomm.integration.checkpoint.folders import best, checkpoints
from pcomm.integration.config.rules import validate
from pcomm.integration.config.toml import apply_overrides
from pcomm.integration.metrics.rows import read_rows
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.parallelize import plan_sequences
from pcomm.integration.train import speed as speed_module
from pcomm.integration.train.speed import Speed, measured_flops

VOCABULARY, TOKENS = 320, 64


@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_those_that_torch_counts(tied):
    config = validate(tiny_config(model={"tie_embeddings": tied, "mlp_width": 96}), 1).model
    model = LanguageModel(config, VOCABULARY)
    tokens = torch.arange(TOKENS)
    with FlopCounterMode(display=False) as counted:
        plan = plan_sequences(model, [0, TOKENS])
        model.token_losses(tokens, tokens, plan).sum().backward()
    products = {
        str(kind): number
        for kind, number in counted.get_flop_counts()["Global"].items()
        if "attention" not in str(kind)
    }
    # The first layer's input is the embedding, which has a gradient, too.
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    own = model.training_flops(0) - 6 * norms
    assert sum(products.values()) == own * TOKENS
    attention = model.training_flops(TOKENS) - model.training_flops(0)
    # Two products of [T, d] and [T, T] in each head forward, and twice as many in backward.
    heads = config.layers * config.heads
    assert attention * TOKENS == 3 * heads * 2 * (2 * TOKENS * TOKENS * config.head_dim)


def test_a_token_meets_some_of_the_experts():
    def flops(**model: int) -> float:
        shape = {"layers": 2, "experts_per_token": 2, "expert_width": 32, **model}
        return LanguageModel(validate(tiny_config(model=shape), 1).model, 320).training_flops(0)

    router = 2 * 32
    assert flops(experts=8) - flops(experts=2) == 6 * router * 6


def test_the_mean_is_that_of_the_last_steps():
    speed = Speed(1000, flops_per_token=2e6, peak_flops=1e10)
    first = speed.row(0, 10.0)
    assert first["tokens_per_s"] == first["mean_tokens_per_s"] == 100
    assert first["mfu"] == pytest.approx(100 * 2e6 / 1e10)
    # A step that is told of twice counts once, with its newer time.
    speed.row(1, 99.0)
    assert speed.row(1, 30.0)["mean_tokens_per_s"] == 50
    rows = [speed.row(step, 1.0) for step in range(2, 22)]
    assert rows[-2]["mean_tokens_per_s"] == pytest.approx(1000 * 20 / (30 + 19))
    assert rows[-1]["mean_tokens_per_s"] == 1000
    assert "mfu" not in Speed(1000, 2e6, None).row(0, 1.0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_peak_is_a_number_of_this_device(dtype):
    assert 1e6 < measured_flops(torch.device("cpu"), dtype) < 1e15


class Clocked(TorchDispatchMode):
    """A processor whose products take the time that its rate says, by a clock of its own."""

    def __init__(self, rate):
        super().__init__()
        self.rate, self.now, self.sides = rate, 0.0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Of inference, where it is not taken apart.
        if func is torch.ops.aten.matmul.default:
            side = len(args[0])
            self.sides.append(side)
            self.now += 2 * side**3 / self.rate
        return func(*args, **(kwargs or {}))


# The larger product takes a tenth of a second at 9.06e9 operations a second.
@pytest.mark.parametrize(("rate", "sides"), [(9.0e9, {192}), (9.1e9, {192, 768})])
def test_a_slow_processor_is_measured_by_a_small_product(rate, sides, monkeypatch):
    with Clocked(rate) as clock:
        monkeypatch.setattr(speed_module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        assert measured_flops(torch.device("cpu"), "fp32") == pytest.approx(rate)
    assert set(clock.sides) == sides


def test_a_run_tells_of_its_speed_and_keeps_the_best_checkpoint(tmp_path, caplog):
    text, run = write_words(tmp_path / "text"), tmp_path / "run"
    caplog.set_level("INFO", "pcomm.train")
    options = ("train.steps=6", "train.eval_every=2", "checkpoint.every=2", "checkpoint.keep=1")
    # A rate at which the text is learnt, and then lost.
    rates = ("train.learning_rate=0.01", "train.peak_tflops=0.5")
    run_words(text, run, *options, *rates, "checkpoint.keep_best=true")
    rows = read_rows(run / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    evaluations = {row["step"]: row["bits_per_byte"] for row in rows if "bits_per_byte" in row}
    assert all(row["eval_s"] > 0 for row in rows if "bits_per_byte" in row)
    for row in steps:
        assert 0 < row["data_ms"] < row["step_ms"]
        assert 0 < row["mfu"] < 1
        assert row["peak_memory_mib"] > 10
    # The peak that was named, whatever this machine measures.
    shares = {row["mfu"] / row["mean_tokens_per_s"] for row in steps}
    assert max(shares) == pytest.approx(min(shares))
    lowest = min(evaluations, key=lambda step: (evaluations[step], -step))
    assert best(run).step == lowest
    assert {one.step for one in checkpoints(run)} == {lowest, 6}
    assert best(run).state()["bits_per_byte"] == evaluations[lowest]
    said = caplog.text
    assert "documents of" in said
    assert "6 steps of 256 tokens are" in said
    assert "AdamW, learning rate 0.01, schedule cosine after 2 steps of warm-up" in said
    shutil.rmtree(run)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.eval_every=none"], "train.eval_every = 'none'"),
        (["data.held_out=0"], "data.held_out = 0"),
        (["checkpoint.every=3"], "checkpoint.every = 3 with train.eval_every = 2"),
        (["train.eval_every=end"], "checkpoint.every = 2 with train.eval_every = 'end'"),
    ],
)
def test_what_was_not_evaluated_cannot_be_the_best(overrides, said):
    wanted = apply_overrides(tiny_config(), ["checkpoint.keep_best=true"])
    assert validate(wanted, 1).checkpoint.keep_best
    with pytest.raises(ConfigError) as raised:
        validate(apply_overrides(wanted, overrides), 1)
    assert "checkpoint.keep_best: the value True" in str(raised.value)
    assert said in str(raised.value)
