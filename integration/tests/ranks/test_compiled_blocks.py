"""Blocks under torch.compile learn what they learn without it."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from integration_support.short_runs import open_trainer, run_words, tiny_config, write_words
from pcomm.core import connect
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.testing import ranks
from pcomm.integration.checkpoint.folders import checkpoints
from pcomm.integration.config.rules import validate, validate_resilient
from pcomm.integration.config.sections import Config, ParallelConfig
from pcomm.integration.data.preparation import open_prepared
from pcomm.integration.metrics.rows import read_rows
from pcomm.integration.parallelize import build_model, open_run_groups
from pcomm.integration.train import run
from pcomm.integration.train.compiled_blocks import CompiledBlocks, check_compiler
from pcomm.integration.train.loop import batches_of
from pcomm.integration.train.trainer import Trainer

# Dynamo looks at it where a block gets what another one has computed.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
LEFT = "tqdm's monitor, which torch.compile starts, lives as long as the process"
STEPS = 3
EXPERTS = {"experts": 4, "expert_width": 32, "moe_every": 2}
ALONE = {
    "A": {"layers": 3, "qk_norm": True, "attention_gate": True},
    "GM": {"pattern": "GM"},
    "experts": EXPERTS,
}
FEW = (("A", False), ("experts", True))
ON_TWO = {
    "replicas": (ParallelConfig(dp=2), {}),
    "shards of stage 3": (ParallelConfig(dp=2, data="shard"), {}),
    "shards of stage 2": (ParallelConfig(dp=2, data="shard", zero=2), {}),
    "tensor and sequence parallel": (ParallelConfig(tp=2, sequence=True), {}),
    "context parallel": (ParallelConfig(cp=2), {"pattern": "GA"}),
    "experts": (ParallelConfig(dp=2, ep=2), EXPERTS),
}
SHORT = ("shards of stage 3",)


def rows_of(trainer: Trainer) -> list[tuple[float, float]]:
    rows = [trainer.step(index).row for index in range(STEPS)]
    return [(row["loss"], row["grad_norm"]) for row in rows]


def graphs_and_breaks() -> tuple[int, int]:
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def compiled_rows(
    config: Config, data: Path, dtype: torch.dtype, backend: str
) -> tuple[list[tuple[float, float]], tuple[int, int]]:
    """Loss and norm of each step, and the graphs and breaks of the first step and of the others."""
    torch._dynamo.reset()
    with connect() as world:
        resolved = validate(config, world.size)
        with open_run_groups(resolved, world) as groups:
            model = build_model(resolved, groups, world.device, dtype=dtype)
            compiled = CompiledBlocks(model, backend=backend)
            trainer = Trainer(model, groups, resolved, batches_of(resolved, open_prepared(data)))
            counts = list[tuple[int, int]]()
            for block in model.blocks:
                block.register_forward_hook(lambda *_: counts.append(graphs_and_breaks()))
            first = trainer.step(0).row
            num_kinds = len(resolved.model.pattern)
            if not resolved.model.experts:
                # Blocks alike share the graphs; the first one begins with the embedding.
                assert len(set(counts[num_kinds : len(model.blocks)])) <= 1
            found = re.search(r"compiled: (\d+) graphs .* (\d+) graph breaks", compiled.describe())
            rest = [trainer.step(index).row for index in range(1, STEPS)]
            again = re.search(r"compiled: (\d+) graphs", compiled.describe())
    torch._dynamo.reset()
    rows = [(row["loss"], row["grad_norm"]) for row in (first, *rest)]
    # Documents have other lengths in each batch, and nothing is compiled for these. The way back
    # from experts to a block without them is a frame that the second step compiles, once.
    assert int(again[1]) - int(found[1]) <= (1 if resolved.model.experts else 0)
    return rows, (int(found[1]), int(found[2]))


def close(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> bool:
    pairs = zip(
        (x for row in found for x in row), (x for row in expected for x in row), strict=True
    )
    return all(abs(one - other) <= 1e-11 for one, other in pairs)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        # Experts have other numbers of rows in each step, so that a graph for any number follows
        # those for one; what is computed again must not take another one.
        pytest.param(name, recompute, marks=[pytest.mark.soak] * ((name, recompute) not in FEW))
        for name in ALONE
        for recompute in (False, True)
    ],
)
def test_one_rank_learns_the_same(name, recompute, run_dir):
    config = tiny_config(model=ALONE[name], recompute=recompute)
    with open_trainer(config, run_dir, torch.float64) as trainer:
        expected = rows_of(trainer)
    found, (graphs, breaks) = compiled_rows(config, run_dir, torch.float64, "aot_eager")
    assert close(found, expected), (found, expected)
    assert graphs > 0
    assert breaks > 0


def test_under_autocast(run_dir):
    config = tiny_config(model={"pattern": "GA"}, dtype="bf16")
    with open_trainer(config, run_dir, torch.float32) as trainer:
        expected = rows_of(trainer)
    found, _ = compiled_rows(config, run_dir, torch.float32, "aot_eager")
    assert found == [pytest.approx(row, rel=2e-2) for row in expected]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in SHORT else [pytest.mark.soak]) for kind in ON_TWO],
)
@ranks(2, leaves=LEFT)
def test_two_ranks_learn_the_same(rank, kind, run_dir):
    parallel, model = ON_TWO[kind]
    config = tiny_config(parallel, model=model, micro_batch_tokens=64)
    with open_trainer(config, run_dir, torch.float64) as trainer:
        expected = rows_of(trainer)
    found, _ = compiled_rows(config, run_dir, torch.float64, "eager")
    assert close(found, expected), (found, expected)


@pytest.mark.parametrize("is_first", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_run_goes_on_from_a_checkpoint_with_or_without_the_compiler(
    is_first, tmp_path, caplog, monkeypatch
):
    """And it says what was compiled, which is nothing more for evaluation and samples."""
    monkeypatch.setattr(run, "CompiledBlocks", partial(CompiledBlocks, backend="eager"))
    text = write_words(tmp_path / "text")
    words = ("train.schedule=constant", "train.eval_every=2", "checkpoint.every=2")
    words += ("train.sample_every=2", "sample.max_tokens=3")
    caplog.set_level("INFO", "pcomm.train")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    run_words(text, tmp_path / "plain", *words, "train.steps=5")
    for steps, is_compiled in ((2, is_first), (5, not is_first)):
        choice = (f"train.steps={steps}", f"train.compile={str(is_compiled).lower()}")
        run_words(text, tmp_path / "mixed", *words, *choice)
    plain, mixed = (
        [row.get("loss", row.get("bits_per_byte")) for row in read_rows(folder / "metrics.jsonl")]
        for folder in (tmp_path / "plain", tmp_path / "mixed")
    )
    assert len(mixed) == 5 + 3
    assert mixed == pytest.approx(plain, rel=1e-6)
    names = [
        [sorted(checkpoint_names(one.folder)) for one in checkpoints(tmp_path / name)]
        for name in ("plain", "mixed")
    ]
    assert names[0] == names[1]
    assert len(names[0]) >= 2
    said = [line for line in caplog.messages if "blocks compiled" in line]
    assert len(said) == 1
    pattern = r"2 blocks compiled: (\d+) graphs for all of them, \d+ graph breaks; "
    graphs = int(re.match(pattern, said[0])[1])
    # No graph for evaluation and samples: a later count is what the line said.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == graphs > 0
    torch._dynamo.reset()


def checkpoint_names(folder: Path) -> set[str]:
    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("parallel.tp=2", "parallel.sequence=true"), id="tp", marks=pytest.mark.soak),
        pytest.param(("parallel.cp=2", "model.pattern=GA"), id="cp", marks=pytest.mark.soak),
        pytest.param(
            ("parallel.dp=2", "parallel.ep=2", "model.experts=4"), id="ep", marks=pytest.mark.soak
        ),
    ],
)
def test_ranks_that_share_a_model_compile_it_and_come_to_the_end(words, rank_pool, tmp_path):
    text = write_words(tmp_path / "text")
    words = (*words, "train.steps=3", "train.eval_every=2", "train.micro_batch_tokens=64")
    for name in ("false", "true"):
        overrides = (*words, f"train.compile={name}")
        run_to_the_end(rank_pool=rank_pool, text=text, folder=tmp_path / name, overrides=overrides)
    plain, compiled = (
        [row.get("loss", row.get("bits_per_byte")) for row in read_rows(folder / "metrics.jsonl")]
        for folder in (tmp_path / "false", tmp_path / "true")
    )
    assert len(plain) == 5
    assert compiled == pytest.approx(plain, rel=1e-5)


@ranks(2, leaves=LEFT)
def run_to_the_end(rank: int, text: str, folder: Path, overrides: tuple[str, ...]) -> None:
    with patch.object(run, "CompiledBlocks", partial(CompiledBlocks, backend="eager")):
        run_words(text, folder, *overrides)
    torch._dynamo.reset()


def test_runs_of_one_process_leave_their_compiled_blocks_to_each_other():
    torch._dynamo.reset()
    compiled_calls = []

    def backend(graph, _inputs):
        def call(*inputs):
            compiled_calls.append(graph)
            return graph(*inputs)

        return call

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Tanh()])

    def is_compiled(model):
        compiled_calls.clear()
        model.blocks[0](torch.zeros(2, 3))
        return bool(compiled_calls)

    one, other = Model(), Model()
    one_blocks, other_blocks = (CompiledBlocks(x, backend=backend) for x in (one, other))

    def found():
        return is_compiled(one), is_compiled(other)

    assert found() == (True, True)
    # Two runs, each evaluating in a thread of its own, would come to their ends in any order.
    first, second = one_blocks.taken_out(), other_blocks.taken_out()
    first.__enter__()
    assert found() == (False, True)
    second.__enter__()
    assert found() == (False, False)
    first.__exit__(None, None, None)
    assert found() == (True, False)
    second.__exit__(None, None, None)
    assert found() == (True, True)
    with pytest.raises(ValueError, match="evaluation"), one_blocks.taken_out():
        raise ValueError("evaluation")
    assert found() == (True, True)
    torch._dynamo.reset()


def test_without_a_compiler_it_is_refused(monkeypatch):
    check_compiler(torch.device("cuda"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    with pytest.raises(
        ConfigError, match=r"(?s)train\.compile: the value true, and .*Install g\+\+"
    ):
        check_compiler(torch.device("cpu"))


def test_a_resilient_run_compiles_nothing():
    config = tiny_config()
    train = dataclasses.replace(config.train, compile=True)
    with pytest.raises(UnsupportedError, match=r"train\.compile: the value True"):
        validate_resilient(dataclasses.replace(config, train=train), 2)
