"""`pcomm train --dry-run`: refuses what the start refuses, leaves nothing, and fits on a screen."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from integration_support.short_runs import run_words, write_words
from pcomm.core.cli import main
from pcomm.core.errors import ConfigError, PcommError
from pcomm.integration import recipes
from pcomm.integration.config.toml import apply_overrides
from pcomm.integration.forecast import dry_run as dry_run_module
from pcomm.integration.forecast.counted_step import Computed
from pcomm.integration.forecast.dry_run import dry_run
from pcomm.integration.forecast.machine import Machine, read_cluster

CLUSTER = """
memory_gib = 80.0
fp32_tflops = 50.0
bf16_tflops = 600.0
memory_gb_per_s = 2000.0
link_gb_per_s = 200.0
network_gb_per_s = 25.0
"""

KEYS = st.fixed_dictionaries(
    {},
    optional={
        "model.pattern": st.sampled_from(["'A'", "'GM'", "'AGM'"]),
        "model.heads": st.sampled_from(["2", "3", "4"]),
        "model.kv_heads": st.sampled_from(["1", "3"]),
        "model.experts": st.sampled_from(["0", "2", "3"]),
        "model.experts_per_token": st.sampled_from(["1", "3"]),
        "model.rotary_fraction": st.sampled_from(["0.5", "0.3"]),
        "parallel.tp": st.sampled_from(["1", "2"]),
        "parallel.data": st.sampled_from(["'shard'", "'hybrid'"]),
        "parallel.zero": st.sampled_from(["1", "3"]),
        "train.sequence_length": st.sampled_from(["32", "48", "4000000000000"]),
        "train.micro_batch_tokens": st.sampled_from(["32", "33"]),
        "data.vocabulary": st.sampled_from(["256", "300"]),
        "data.held_out": st.sampled_from(["0.0", "0.99"]),
        "data.path": st.sampled_from(["['/nowhere/at/all.txt']"]),
    },
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_words(tmp_path_factory.mktemp("text"), documents=12)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def refusal(call) -> str | None:
    try:
        call()
    except PcommError as error:
        return f"{type(error).__name__}: {error}"
    return None


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=KEYS)
def test_it_refuses_what_the_start_refuses(tmp_path_factory, text, changes):
    """The start itself is the oracle: one step of a run on this process."""
    out = tmp_path_factory.mktemp("out") / "run"
    words = ["train.steps=1", "train.eval_every='none'", *map("=".join, changes.items())]
    config = apply_overrides(recipes.tiny(), [f"data.path=['{text}']", *words])
    said = refusal(lambda: dry_run(config, out, 1))
    assert not out.exists()
    assert said == refusal(lambda: run_words(text, out, *words))


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--ranks", "3", "--set", "parallel.tp=2"], "TopologyError: parallel"),
        (["--ranks", "0"], "ConfigError: pcomm train --ranks 0"),
        (["--set", "model.heads=3"], "ConfigError: model.head_dim"),
        (["--set", "modle.heads=3"], "Did you mean"),
    ],
)
def test_refusals_of_the_command_are_the_same(tmp_path, capsys, words, wanted):
    out = tmp_path / "run"
    told = []
    for dry in ([], ["--dry-run"]):
        assert main(["train", "--out", str(out), *words, *dry]) == 2
        told.append(capsys.readouterr().err)
    assert told[0] == told[1]
    assert wanted in told[0]
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (CLUSTER + "bf16_tflop = 1.0", "bf16_tflop"),
        ("memory_gib = 80.0", "cluster.fp32_tflops"),
        (CLUSTER.replace("600.0", "0.0"), "cluster.bf16_tflops"),
        ("memory_gib = ", "--cluster"),
        (None, "--cluster"),
    ],
    ids=["unknown key", "missing key", "nothing a second", "no TOML", "no file"],
)
def test_a_cluster_that_is_none(tmp_path, content, wanted):
    path = tmp_path / "cluster.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=wanted):
        read_cluster(path)


def test_the_screen_of_many_ranks(tmp_path, text, cluster, capsys):
    words = ["model.layers=2", "model.width=64", "train.global_batch_tokens=16384"]
    words += ["parallel.tp=2", "parallel.data='shard'", "data.vocabulary=300"]
    sets = [part for word in (f"data.path=['{text}']", *words) for part in ("--set", word)]
    out = tmp_path / "deep" / "run"
    command = ["train", "--dry-run", "--ranks", "16", "--out", str(out), *sets]
    assert main([*command, "--cluster", str(cluster)]) == 0
    screen = capsys.readouterr().out
    assert len(screen.splitlines()) <= 25
    for word in (
        "parameters in blocks AA",
        "dp 8 x cp 1 x tp 2",
        "checkpoint",
        "data.inner[gather]",
    ):
        assert word in screen
    assert not out.parent.exists()


def test_text_that_is_not_tokenised_is_estimated(tmp_path, text, cluster, monkeypatch):
    config = apply_overrides(recipes.tiny(), [f"data.path=['{text}']"])
    size = sum(Path(path).stat().st_size for path in Path(text).parent.glob("*.txt"))
    for limit, word in ((size, "held out with"), (size - 1, "not read")):
        monkeypatch.setattr(dry_run_module, "_TOKENISED_BYTES", limit)
        assert word in dry_run(config, tmp_path / "run", 1, cluster=cluster).text


def test_a_step_is_as_long_as_its_slower_half(cluster):
    """By hand: a product is bound by flops or by bytes, and nothing is shorter than a launch."""
    import torch

    machine = dataclasses.replace(read_cluster(cluster), operation_us=10.0)
    assert isinstance(machine, Machine)
    product = Computed(torch.bfloat16, int(600e12), 1)
    assert machine.seconds(product) == pytest.approx(1.0, rel=1e-4)
    assert machine.seconds(product._replace(dtype=torch.float32)) == pytest.approx(12, rel=1e-4)
    assert machine.seconds(Computed(torch.float32, 1, int(4e12))) == pytest.approx(2, rel=1e-4)
    assert machine.seconds(Computed(torch.float32, 0, 0)) == pytest.approx(1e-5)
