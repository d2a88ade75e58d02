"""Index tensors: a plan owns them, `prepare` makes all of them, and they end with the plan."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_cp_support.planned_mixers import CHUNK, SequenceStates, continued, mixer, weights_of
from pcomm.core.errors import ConfigError
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual
from pcomm.gdn_cp import AttentionSpec, GdnSpec, Mamba2Spec, Plan, Spec, make_plan
from pcomm.gdn_cp.ops.backend import filled_sequences

GDN, MAMBA, ATTENTION = GdnSpec(2, 4, 3, 5), Mamba2Spec(4, 3, 2, 5), AttentionSpec(4, 2, 4)
SPECS: list[Spec] = [GDN, MAMBA, ATTENTION]
PACK, DIM = (0, 48, 48, 96, 192, 240), 6
STRATEGIES = ["heads", "docs", "state", "gather"]


def layers(plan: Plan) -> None:
    """Forward and backward of a layer of each kind, as whole sequences and as continued ones."""
    x = plan.shard(torch.randn(plan.tokens.num_tokens, DIM).double()).requires_grad_()
    y = x
    for spec in SPECS:
        weights = weights_of(spec, DIM)
        y = y + mixer(plan, spec, y, weights)
        if spec.state:
            z, after = continued(plan, spec, x, weights, None)  # type: ignore[arg-type]
            again, _ = continued(plan, spec, x, weights, SequenceStates(*after))  # type: ignore[arg-type]
            y = y + z + again
    y.square().sum().backward()


def tensors_of(plan: Plan) -> Iterator[Tensor]:
    """Every tensor that hangs on a plan, on whatever way."""
    seen, left = {id(plan)}, [plan.__dict__]
    while left:
        for value in gc.get_referents(left.pop()):
            # Classes, functions and modules lead everywhere.
            if id(value) in seen or isinstance(value, type) or callable(value):
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                yield value
            elif not isinstance(value, VirtualCollectives):
                left.append(value)


def num_tensors() -> int:
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [("heads", "zigzag"), ("docs", "contiguous"), ("state", "zigzag"), ("gather", "contiguous"),
     ("heads", "contiguous")],
)  # fmt: skip
def test_prepare_makes_every_index_tensor_beforehand(strategy: Any, layout: Any) -> None:
    def on_rank(collectives: VirtualCollectives) -> None:
        plan = make_plan(PACK, collectives, SPECS, strategy=strategy, layout=layout)
        plan.prepare("cpu", is_continued=True, chunk=CHUNK)
        prepared = {id(x) for x in tensors_of(plan)}
        layers(plan)
        plan.positions()
        for spec in SPECS:
            plan.positions_of(spec)
            plan.cu_seqlens_of(spec)
        assert [x.shape for x in tensors_of(plan) if id(x) not in prepared] == []

    run_virtual(on_rank, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_index_tensors_of_two_devices_do_not_meet(strategy: Any) -> None:
    """A layer on the second device would otherwise index with tensors of the first."""

    def on_rank(collectives: VirtualCollectives) -> None:
        plan = make_plan(PACK, collectives, SPECS, strategy=strategy)
        plan.prepare("cpu", is_continued=True, chunk=CHUNK)
        on_cpu = {id(x) for x in tensors_of(plan)}
        plan.prepare("meta", is_continued=True, chunk=CHUNK)
        added = [x for x in tensors_of(plan) if id(x) not in on_cpu]
        assert {x.device.type for x in added if x.numel()} >= {"meta"}
        assert plan.positions("meta").device.type == "meta"
        assert plan.positions("cpu").device.type == "cpu"
        for spec in SPECS:
            assert plan.positions_of(spec, "meta").is_meta
            offsets = plan.cu_seqlens_of(spec)
            assert offsets.derived(filled_sequences, torch.device("meta"))[0].is_meta
        # Which the layers on the CPU would fail on.
        layers(plan)

    run_virtual(on_rank, 2)


def test_plans_that_are_dropped_leave_nothing_behind() -> None:
    """At once: without a cycle nothing has to wait for the garbage collector."""

    def on_rank(collectives: VirtualCollectives, packs: range) -> None:
        for n in packs:
            # Each pack once: what is kept for a pack that comes again would not be noticed.
            pack = (0, 48, 48, 96 + 4 * n, 240)
            plan = make_plan(pack, collectives, SPECS, strategy=STRATEGIES[n % 4])  # type: ignore[arg-type]
            layers(plan.prepare("cpu", is_continued=True, chunk=CHUNK))

    run_virtual(lambda collectives: on_rank(collectives, range(4)), 2)
    gc.collect()
    before, num_threads = num_tensors(), threading.active_count()
    gc.disable()
    try:
        run_virtual(lambda collectives: on_rank(collectives, range(4, 8)), 2)
        assert num_tensors() <= before
        assert threading.active_count() == num_threads
    finally:
        gc.enable()


def test_a_copy_is_the_plan_and_a_pickle_its_integers() -> None:
    def on_rank(collectives: VirtualCollectives) -> None:
        plan = make_plan(PACK, collectives, SPECS, strategy="docs", hidden_dim=DIM).prepare("cpu")
        assert copy.copy(plan) is plan
        assert copy.deepcopy([plan])[0] is plan
        read = pickle.loads(pickle.dumps(plan))
        assert read == plan
        assert hash(read) == hash(plan)
        assert read.describe() == plan.describe()
        assert list(tensors_of(pickle.loads(pickle.dumps(plan)))) == []
        with pytest.raises(ConfigError, match="read from a pickle"):
            read.enter(GDN, torch.zeros(PACK[-1] // 2, DIM))
        assert pickle.loads(pickle.dumps(plan.cu_seqlens_of(GDN))) == plan.cu_seqlens_of(GDN)

    run_virtual(on_rank, 2)


def test_a_chunk_without_tokens_cannot_be_prepared() -> None:
    with pytest.raises(ConfigError, match="chunk=0"):
        make_plan(PACK, (0, 2), GDN).prepare("cpu", chunk=0)
