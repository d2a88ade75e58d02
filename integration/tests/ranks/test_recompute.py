"""Blocks that are computed again in backward: the same training bit for bit, and less memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from integration_support.short_runs import Steps, open_trainer, tiny_config, train_steps
from pcomm.core.testing import ranks
from pcomm.integration.config.sections import Config, ParallelConfig

STEPS = 2
EXPERTS = {"experts": 4, "expert_width": 32}
ALONE = {
    "A": {},
    "GMA": {"pattern": "GMA", "layers": 3},
    "experts": EXPERTS,
}
ON_TWO = {
    "replicas, two micro-batches": (ParallelConfig(dp=2), {"layers": 3}),
    "shards of stage 3": (ParallelConfig(dp=2, data="shard"), {"layers": 3}),
    "shards of stage 2": (ParallelConfig(dp=2, data="shard", zero=2), {"layers": 3}),
    "tensor and sequence parallel": (ParallelConfig(tp=2, sequence=True), {}),
    "context parallel": (ParallelConfig(cp=2), {"pattern": "GMA", "layers": 3}),
    "experts": (ParallelConfig(dp=2, ep=2), EXPERTS),
    "one rank of three missing": (ParallelConfig(dp=2, tp=2, failed=("dp=0,tp=1",)), {}),
}


def batch_of(parallel: ParallelConfig) -> dict[str, int]:
    """Two micro-batches for each replica, of rows that ranks along `cp` do not share alike."""
    if parallel.cp > 1:
        return {"global_batch_tokens": 192, "micro_batch_tokens": 96}
    return {"micro_batch_tokens": 64 if parallel.dp == 2 else 128}


def changed(config: Config, **train: object) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **train))


def assert_same_bits(found: Steps, expected: Steps) -> None:
    assert found.rows == expected.rows
    assert found.views.keys() == expected.views.keys()
    for name, view in found.views.items():
        assert torch.equal(view.tensor, expected.views[name].tensor), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ALONE)
def test_one_rank_computes_the_same_again(name, dtype, run_dir):
    config = tiny_config(model=ALONE[name], dtype=dtype)
    plain = train_steps(config, run_dir, torch.float32, STEPS)
    again = train_steps(changed(config, recompute=True), run_dir, torch.float32, STEPS)
    assert_same_bits(again, plain)


# Shards of stage 3 are gathered again, too, and experts are computed in both streams alone.
SOAKED = ("shards of stage 2",)
SOAKED_NARROW = ("experts",)


def kinds(names: Iterable[str], soaked: Sequence[str]) -> list[Any]:
    """Parameters of a test, some of them with the mark of long ones."""
    return [pytest.param(name, marks=[pytest.mark.soak] * (name in soaked)) for name in names]


@pytest.mark.parametrize("kind", kinds((kind for kind in ON_TWO if "missing" not in kind), SOAKED))
@ranks(2)
def test_two_ranks_compute_and_send_the_same_again(rank, kind, run_dir):
    parallel, model = ON_TWO[kind]
    config = tiny_config(parallel, model=model, **batch_of(parallel))
    plain = train_steps(config, run_dir, torch.float32, STEPS)
    again = train_steps(changed(config, recompute=True), run_dir, torch.float32, STEPS)
    assert_same_bits(again, plain)


@pytest.mark.parametrize(
    "kind",
    kinds(["shards of stage 3", "tensor and sequence parallel", "experts"], SOAKED_NARROW),
)
@ranks(2)
def test_two_ranks_compute_the_same_again_with_a_narrow_stream(rank, kind, run_dir):
    parallel, model = ON_TWO[kind]
    config = tiny_config(
        parallel,
        model=model,
        dtype="bf16",
        residual="compute",
        **batch_of(parallel),
    )
    plain = train_steps(config, run_dir, torch.float32, STEPS)
    again = train_steps(changed(config, recompute=True), run_dir, torch.float32, STEPS)
    assert_same_bits(again, plain)
    # Rounded in other places than the wide stream, whose losses are near.
    wide = train_steps(changed(config, residual="fp32"), run_dir, torch.float32, STEPS)
    assert wide.views.keys() == plain.views.keys()
    assert wide.rows != plain.rows
    for one, other in zip(wide.rows, plain.rows, strict=True):
        # Each of the few sums is rounded to 8 bits, and logits are small at first.
        assert one[0] == pytest.approx(other[0], rel=8 * 2**-8)


@ranks(3)
def test_so_do_ranks_of_uneven_replicas(rank, run_dir):
    parallel, model = ON_TWO["one rank of three missing"]
    config = tiny_config(parallel, model=model)
    plain = train_steps(config, run_dir, torch.float32, STEPS)
    again = train_steps(changed(config, recompute=True), run_dir, torch.float32, STEPS)
    assert_same_bits(again, plain)


def tensors(tree: object) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]


class Kept(TorchDispatchMode):
    """Counts the bytes of storages that operations have made, and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        # A view of a parameter makes nothing.
        before = {one.untyped_storage()._cdata for one in tensors(args)}
        for storage in (one.untyped_storage() for one in tensors(found)):
            if storage._cdata not in before:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return found

    @property
    def num_bytes(self) -> int:
        return sum(size for reference, size in self._made.values() if not reference.expired())


def kept_by_a_forward(config: Config, run_dir: Path) -> int:
    """Bytes that backward finds of what the forward of one batch has computed."""
    with open_trainer(config, run_dir, torch.float32) as trainer, Kept() as kept:
        losses = trainer._forward(trainer.batches.batch(0))
        found = kept.num_bytes
        del losses
    return found


@pytest.mark.parametrize("name", ["A", "GMA"])
def test_a_block_keeps_its_input_and_nothing_else(name, run_dir):
    def kept(layers: int, **train: object) -> int:
        config = tiny_config(model={**ALONE[name], "layers": layers}, **train)
        return kept_by_a_forward(config, run_dir)

    period = len(ALONE[name].get("pattern", "A"))
    more, again = (
        kept(2 * period, recompute=recompute) - kept(period, recompute=recompute)
        for recompute in (False, True)
    )
    tiny = tiny_config()
    stream = tiny.train.global_batch_tokens * tiny.model.width * 4
    # What a block needs is many times the residual stream at its ends.
    assert more > 8 * period * stream
    assert again == period * stream
    half = {"recompute": True, "dtype": "bf16", "residual": "compute"}
    assert 2 * (kept(2 * period, **half) - kept(period, **half)) == period * stream
