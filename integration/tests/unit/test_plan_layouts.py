"""`pcomm plan --model`: layouts counted as the dry run counts them, and why others are left out."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from integration_support.short_runs import tiny_config
from pcomm.core import cli
from pcomm.core.errors import ConfigError, TopologyError
from pcomm.integration import recipes
from pcomm.integration.commands import plan as plan_module
from pcomm.integration.config.rules import validate, validate_resilient
from pcomm.integration.config.sections import Resolved
from pcomm.integration.config.toml import apply_overrides, to_toml
from pcomm.integration.data.batches import TrainBatches
from pcomm.integration.forecast import layouts
from pcomm.integration.forecast.counted_once import CountedOnce
from pcomm.integration.forecast.counted_step import count_step
from pcomm.integration.forecast.dry_run import parameters_by_kind, synthetic_batches
from pcomm.integration.forecast.layouts import candidates, rank_layouts
from pcomm.integration.forecast.machine import Machine, predict_step
from pcomm.integration.forecast.resilient_step import count_resilient_step
from pcomm.ntp import plan_command

CLUSTER = {
    "ranks_per_host": 2,
    "memory_gib": 1.0,
    "fp32_tflops": 0.1,
    "bf16_tflops": 0.2,
    "memory_gb_per_s": 10.0,
    "link_gb_per_s": 1.0,
    "network_gb_per_s": 0.1,
}
MACHINE = Machine(**CLUSTER)
CONFIG = tiny_config(
    model={"layers": 1, "mlp_width": 63}, sequence_length=32, global_batch_tokens=128
)
# Two rows: one other micro-batch on one rank, and none on two.
ROWS = replace(CONFIG, train=replace(CONFIG.train, global_batch_tokens=64))
MIB = 2**20
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`pcomm plan` where both packages are installed."""
    found = EntryPoints(
        [
            EntryPoint("plan", "pcomm.ntp.plan_command:command", cli.GROUP),
            EntryPoint("model", "pcomm.integration.commands.plan:mode", "pcomm.plan"),
        ]
    )
    for module in (cli, plan_command):
        monkeypatch.setattr(module, "entry_points", lambda group: found.select(group=group))
    # Nothing that depends on how long it takes.
    monkeypatch.setattr(plan_module, "_TELL_S", 1e6)
    plan_command.command.__dict__.pop("modes", None)

    def call(*words: object) -> tuple[int, str, str]:
        code = cli.main(["plan", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield call
    plan_command.command.__dict__.pop("modes", None)


@pytest.fixture(autouse=True)
def _count_once(steps: dict[tuple[str, ...], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Count each layout once for all tests of the file: what a step does follows from its key."""

    def once(count: Callable[..., Any]) -> Callable[..., Any]:
        def counted(config: Resolved, batches: TrainBatches, *hosts: int) -> Any:
            key = (count.__name__, repr(config), *map(str, hosts))
            if key not in steps:
                steps[key] = count(config, batches, *hosts)
            return steps[key]

        return counted

    for count in (count_step, count_resilient_step):
        monkeypatch.setattr(layouts, count.__name__, once(count))


@pytest.fixture(scope="module")
def steps() -> dict[tuple[str, ...], object]:
    """Steps that were counted, by function and arguments."""
    return {}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A configuration and a cluster."""
    config, cluster = tmp_path / "run.toml", tmp_path / "cluster.toml"
    config.write_text(to_toml(CONFIG))
    cluster.write_text("".join(f"{key} = {value}\n" for key, value in CLUSTER.items()))
    return config, cluster


def test_both_modes_are_one_command(run: Run, files: tuple[Path, Path]) -> None:
    _, shown, _ = run("--help")
    for option in ("--model", "--gpus", "--seconds", "--axes", "--failures", "--heads", "--json"):
        assert option in shown
    code, out, _ = run("--axes", "dp=2,tp=4", "--heads", 8, "--failures", "dp=0,tp=1")
    assert (code, out.split("\n")[0]) == (
        0,
        "8 ranks, 1 failed, 1 of 2 replicas at a reduced degree",
    )
    for words, wanted in (
        ([], "no --model or --axes"),
        (["--model", files[0], "--axes", "dp=2"], "--model and --axes"),
        (["--model", files[0]], "no --gpus"),
        (["--model", files[0], "--gpus", "0"], "--gpus 0"),
        (["--model", files[0].parent, "--gpus", "2"], "config.json"),
        (["--model", files[0], "--gpus", 2, "--cluster", "absent"], "--cluster absent"),
    ):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert wanted in err
        assert err.count("\n") >= 3


def test_each_row_is_what_the_dry_run_says_with_its_settings(
    run: Run, files: tuple[Path, Path]
) -> None:
    config, cluster = files
    words = ["--model", config, "--gpus", 2, "--cluster", cluster, "--seconds", 1e6]
    code, out, _ = run(*words, "--json")
    assert code == 0
    found = json.loads(out)
    rows, left = found["layouts"], found["left_out"]
    total = len(list(candidates(CONFIG, 2, MACHINE.ranks_per_host)))
    assert left["refused"] == {"model.mlp_width": 1}
    assert len(rows) + 1 + left["slower_by_arithmetic"] == total == 7
    assert [row["step_s"] for row in rows] == sorted(row["step_s"] for row in rows)
    for number, row in enumerate(rows):
        resolved = validate(apply_overrides(CONFIG, row["set"]), 2)
        again = layouts.count_step if number else count_step
        step = again(resolved, synthetic_batches(resolved))
        assert (step.memory.peak, step.sent()) == (row["memory_bytes"], row["sent_bytes"])
        assert predict_step(step, MACHINE, 2).seconds == pytest.approx(row["step_s"], rel=1e-9)
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert (
        f"{left['slower_by_arithmetic']} whose products" in out or not left["slower_by_arithmetic"]
    )
    assert "next: pcomm train --dry-run --config" in out


def test_layouts_of_a_resilient_run_show_their_copies(run: Run, files: tuple[Path, Path]) -> None:
    config, cluster = files
    words = ["--model", config, "--gpus", 4, "--cluster", cluster, "--seconds", 1e6]
    code, out, _ = run(*words, "--resilient", "--json")
    assert code == 0
    rows = json.loads(out)["layouts"]
    assert {(row["data"], row["copies"]) for row in rows if row["dp"] == 4} <= {
        ("replicate", 2),
        ("shard", 1),
        ("shard", 2),
    }
    parameters = sum(parameters_by_kind(validate(CONFIG, 1)).values())
    for row in rows:
        resolved = validate_resilient(apply_overrides(CONFIG, row["set"]), 4)
        counted = layouts.count_resilient_step(
            resolved, synthetic_batches(resolved), MACHINE.ranks_per_host
        )
        assert counted.step.memory.peak == row["memory_bytes"]
        assert (counted.weight_bytes, asdict(counted.survival)) == (
            row["weight_bytes"],
            row["survival"],
        )
        holders = row["dp"] * row["cp"]
        owners = row["copies"] if row["data"] == "shard" else holders
        assert row["survival"]["ranks"] == owners
        if row["tp"] == 1:
            # Two averages of each copy, and what is no view of a weight; a count of steps each.
            assert row["memory"]["optimizer"] >= 8 * parameters * owners / holders - 64
        least = layouts.least_memory(resolved, parameters_by_kind(resolved), is_resilient=True)
        memory = counted.step.memory
        assert least <= memory.weights + memory.optimizer + memory.all_gradients + 64
    code, out, err = run(*words, "--resilient")
    assert (code, err) == (0, "")
    assert "the death of any 1 rank" in out
    assert "next: pcomm train --dry-run --resilient --config" in out


def test_what_is_left_out_by_arithmetic_is_not_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle counts every layout, with links so slow that arithmetic leaves many out."""
    slow = replace(MACHINE, link_gb_per_s=0.002, network_gb_per_s=0.001)
    config = replace(ROWS, model=replace(ROWS.model, mlp_width=64))
    ranking = rank_layouts(config, 2, slow, limit_s=1e6)
    assert ranking.slower >= 1
    monkeypatch.setattr(layouts, "least_seconds", lambda *_: 0.0)
    everything = rank_layouts(config, 2, slow, limit_s=1e6)
    assert everything.slower == 0
    monkeypatch.undo()
    assert ranking.layouts[0].time == everything.layouts[0].time
    for one in everything.layouts:
        parameters = parameters_by_kind(one.config)
        assert layouts.least_seconds(one.config, slow, parameters) <= one.time.seconds
        assert layouts.least_memory(one.config, parameters) <= one.step.memory.peak


def test_muon_keeps_less_than_adamw() -> None:
    """Arithmetic must not leave a layout out that fits; one row beside wide matrices is little."""
    config = tiny_config(
        model={"layers": 2, "width": 256, "mlp_width": 1024},
        optimizer="muon",
        sequence_length=4,
        global_batch_tokens=4,
        recompute=True,
    )
    resolved = validate(config, 1)
    step = count_step(resolved, synthetic_batches(resolved))
    least = layouts.least_memory(resolved, parameters_by_kind(resolved))
    assert least <= step.memory.weights + step.memory.optimizer + step.memory.all_gradients


def test_a_layout_that_does_not_fit_gets_smaller_micro_batches_and_recomputes() -> None:
    """Memory is set between what was counted by hand for each of these."""

    def peak(**train: object) -> int:
        config = replace(ROWS, train=replace(ROWS.train, **train))
        resolved = validate(config, 1)
        return layouts.count_step(resolved, synthetic_batches(resolved)).memory.peak

    whole, one_row = peak(), peak(micro_batch_tokens=32)
    least = peak(micro_batch_tokens=32, recompute=True)
    assert least < one_row < whole

    def best(num_bytes: float) -> layouts.CountedLayout:
        machine = replace(MACHINE, memory_gib=num_bytes / 2**30)
        return rank_layouts(ROWS, 1, machine, limit_s=1e6).layouts[0]

    for num_bytes, micro, recompute, fits in (
        (whole, 64, False, True),
        (one_row, 32, False, True),
        (one_row - 1, 32, True, True),
        (least - 1, 32, True, False),
    ):
        found = best(num_bytes + 0.5)
        train = found.config.train
        assert (train.micro_batch_tokens, train.recompute, found.fits) == (micro, recompute, fits)


def test_limits_and_refusals() -> None:
    ranking = rank_layouts(CONFIG, 2, MACHINE, limit_s=0.0)
    assert len(ranking.layouts) == 1
    assert ranking.not_reached >= 1
    # Weights, gradients and averages of replicas alone are more than a rank has, of shards less.
    parameters = sum(parameters_by_kind(validate(CONFIG, 1)).values())
    small = replace(MACHINE, memory_gib=12.0 * parameters / 2**30)
    # Nothing fits in the end, and where all is done for that already, few more are counted.
    rows = replace(ROWS, train=replace(ROWS.train, recompute=True))
    kept = rank_layouts(rows, 2, small, limit_s=1e6)
    assert kept.too_large == 2
    assert {one.config.parallel.data for one in kept.layouts} == {"shard"}
    with pytest.raises((ConfigError, TopologyError)):
        rank_layouts(CONFIG, 7, MACHINE, limit_s=1e6)


def test_a_directory_needs_no_weights(run: Run, files: tuple[Path, Path], tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 300}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--set", "train.sequence_length=32", "--set", "train.global_batch_tokens=64"]
    code, out, err = run("--model", tmp_path, "--gpus", 1, "--cluster", files[1], *words)
    assert (code, err) == (0, "")
    assert "next: pcomm train --dry-run --set model.from=" in out


def test_what_is_done_is_told_where_no_terminal_is(
    run: Run, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "_TELL_S", 1e-3)
    before = threading.active_count()
    code, _, err = run("--model", files[0], "--gpus", 1, "--cluster", files[1])
    assert code == 0
    assert re.search(r"^layout 1 of 1: dp 1, after \d+ s$", err, re.MULTILINE)
    assert threading.active_count() == before


# Of each there are several, and every one is made of many operations.
ALIKE = {
    "GDN": ("G", 1, {}),
    "both, computed again": ("GM", 1, {"train.recompute": "true"}),
    "shards": ("GA", 2, {"parallel.data": "'shard'"}),
    "context parallel": ("GM", 2, {"parallel.cp": "2"}),
    "micro-batches of packs that differ": ("M", 1, {"train.micro_batch_tokens": "64"}),
}


SHORT = "both, computed again"


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=[pytest.mark.soak] * (one != SHORT)) for one in ALIKE]
)
def test_what_is_told_again_is_what_is_counted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle counts each layer: events in order, and memory to the byte."""
    pattern, num_ranks, words = ALIKE[case]
    layers, row, tokens = ("2", "32", "32") if case == SHORT else ("4", "64", "256")
    changes = {"model.layers": layers, "model.pattern": f"'{pattern}'", "data.vocabulary": "300"}
    changes |= {"train.sequence_length": row, "train.global_batch_tokens": tokens, **words}
    config = apply_overrides(recipes.tiny(), [f"{key}={value}" for key, value in changes.items()])
    resolved = validate(config, num_ranks)
    again, times = CountedOnce._again, 0

    def told(self: CountedOnce, *given: Any) -> Any:
        nonlocal times
        times += 1
        return again(self, *given)

    monkeypatch.setattr(CountedOnce, "_again", told)
    found = count_step(resolved, synthetic_batches(resolved))
    assert times > 10
    monkeypatch.setattr(CountedOnce, "within", lambda self: nullcontext())
    wanted = count_step(resolved, synthetic_batches(resolved))
    assert found.memory == wanted.memory
    assert [str(event) for event in found.events] == [str(event) for event in wanted.events]
