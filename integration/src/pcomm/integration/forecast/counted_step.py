"""A step of the real trainer on fake tensors: what it allocates, computes and sends on one rank.

Nothing is estimated by formulas of our own: the model, its shards, the optimizer and the trainer
are those of a run. Tensors of floating point have shapes and no memory (`FakeTensorMode`); host
integers, such as the boundaries of documents, are real, since plans are made of them. Experts get
as many tokens each.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from pcomm.core import Groups, GroupSpec, Topology
from pcomm.integration.config.nonuniform import plan_of
from pcomm.integration.config.sections import Resolved
from pcomm.integration.data.batches import TrainBatches
from pcomm.integration.forecast.counted_once import CountedOnce
from pcomm.integration.forecast.lone_rank import Sent, lone_groups, lone_world
from pcomm.integration.forecast.replay import OperationCall
from pcomm.integration.parallelize import build_model, open_run_groups
from pcomm.integration.replicas import used_ranks
from pcomm.integration.train.trainer import Trainer

__all__ = ["Computed", "CountedStep", "Memory", "StepCounter", "Waited", "count_step"]

aten = torch.ops.aten


class Computed(NamedTuple):
    """An operation of the rank."""

    dtype: torch.dtype
    """Dtype in which it computes."""

    flops: int
    """Multiplications and additions of a matrix product or of attention; 0 for others."""

    num_bytes: int
    """Bytes of its inputs and results."""

    call: OperationCall | None = None
    """The operation itself, where it can be done again."""


class Waited(NamedTuple):
    """The rank waits for a collective."""

    number: int
    """Place of its `Sent` among the events."""


Event = Computed | Sent | Waited


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank when it holds most in a step, by what they are.

    Args:
        weights: Parameters, or this rank's shards of them.
        optimizer: State of the optimizer.
        gradients: Gradients that are there at that time.
        activations: All other tensors: what backward needs, gathered parameters, what is in flight.
        all_gradients: Gradients at the end of backward.
    """

    weights: int
    optimizer: int
    gradients: int
    activations: int
    all_gradients: int

    @property
    def peak(self) -> int:
        """All of it."""
        return self.weights + self.optimizer + self.gradients + self.activations


@dataclass(frozen=True)
class CountedStep:
    """A step on rank 0, after the first one.

    Args:
        memory: Memory of the rank at the peak.
        events: Operations, messages and waits of the rank, in order.
    """

    memory: Memory
    events: Sequence[Event]

    def sent(self) -> dict[str, int]:
        """Least bytes that the rank sends in the step, by the key of the group."""
        found: Counter[str] = Counter()
        for event in self.events:
            if isinstance(event, Sent):
                found[event.group.key] += event.sent_bytes
        return dict(found)

    @property
    def flops(self) -> int:
        """Multiplications and additions of matrix products and attention."""
        return sum(event.flops for event in self.events if isinstance(event, Computed))


def count_step(config: Resolved, batches: TrainBatches) -> CountedStep:
    """The second step of a run, on rank 0, counted without ranks, weights or gradients. Local.

    Args:
        config: The validated configuration, for any number of ranks.
        batches: The batches of the run; their documents decide what attention computes.

    Raises:
        PcommError: What a rank of the real run raises when it builds the model.
    """
    parallel, plan, counter = config.parallel, plan_of(config), StepCounter()
    num_ranks = parallel.dp * parallel.cp * parallel.tp if plan is None else len(used_ranks(plan))
    world = lone_world(num_ranks)
    groups = open_run_groups(config, world, open_with=counter.open_groups)
    with counter.counting():
        model = build_model(config, groups, world.device)
        trainer = Trainer(model, groups, config, batches, compares=False)
        for index in range(2):
            counter.begin()
            trainer.change(index)
        parameters = [p for _, p in trainer.replicas.named_parameters()]
        states = [s for state in trainer.optimizer.state.values() for s in state.values()]
        return counter.counted(parameters, states)


class StepCounter:
    """Counts what a rank does, be it the step of a run or anything else on groups of its own."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._watch = _Allocations()
        self._once = CountedOnce(self._watch, self._events)

    def open_groups(
        self, topology: Topology, specs: Sequence[str | tuple[str, str] | GroupSpec], **_: object
    ) -> Groups:
        """The groups of rank 0 as `open_groups` opens them, without the others. Local."""
        return lone_groups(topology, specs, self._tell)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within it tensors have no memory, and what is done with them is counted."""
        rank = _FakeRank(self._watch, self._events)
        with self._watch.following(), self._once.within(), rank:
            yield

    def begin(self) -> None:
        """Forget what was done, but for the memory that it has left. Local."""
        self._events.clear()
        self._watch.begin()

    @property
    def sent_bytes(self) -> int:
        """Least bytes that the rank has sent since `begin`."""
        return sum(event.sent_bytes for event in self._events if isinstance(event, Sent))

    def counted(self, parameters: Sequence[Tensor], states: Sequence[Tensor]) -> CountedStep:
        """What was done since `begin`. Local.

        Args:
            parameters: Parameters, whose gradients are counted, too.
            states: State of the optimizer; views of parameters are none.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        return CountedStep(self._watch.memory(parameters, states, gradients), tuple(self._events))

    def _tell(self, sent: Sent) -> Callable[[], None]:
        self._events.append(sent)
        number = len(self._events) - 1
        return lambda: self._events.append(Waited(number))


# -- memory ------------------------------------------------------------------------------------


@dataclass
class _Storage:
    num_bytes: int
    born: int


@dataclass
class _Allocations:
    """The memory that fake tensors would have."""

    storages: dict[int, _Storage] = field(default_factory=dict)
    total: int = 0
    clock: int = 0
    peak: int = 0
    peak_at: int = 0

    def begin(self) -> None:
        """Look for a new peak from now on."""
        self.peak = 0
        self._look()

    def restart(self) -> tuple[int, int]:
        """Look for a new peak; returns the one so far, for `reach`."""
        before = self.peak, self.peak_at
        self.begin()
        return before

    def reach(self, peak: tuple[int, int]) -> None:
        """What was the peak before is one again, if nothing held as much since."""
        if peak[0] >= self.peak:
            self.peak, self.peak_at = peak

    def hold(self, extra: int) -> None:
        """So many bytes more are there for a moment."""
        self.clock += 1
        self.total += extra
        self._look()
        self.total -= extra

    def see(self, result: object) -> None:
        """An operation has this result."""
        self.clock += 1
        for one in tree_leaves(result):
            if not isinstance(one, FakeTensor):
                continue
            storage = one.untyped_storage()
            key = storage._cdata
            if key not in self.storages:
                self.storages[key] = _Storage(storage.nbytes(), self.clock)
                self.total += storage.nbytes()
                weakref.finalize(storage, self._forget, key)
        self._look()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Within it, a storage that is resized is counted with its new size."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            known = self.storages.get(storage._cdata)
            if known is not None:
                self.total += size - known.num_bytes
                known.num_bytes, known.born = size, self.clock
                self._look()
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def memory(
        self, weights: Sequence[Tensor], optimizer: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> Memory:
        """What was there at the peak."""
        own = self._bytes(weights)
        state = self._bytes([*weights, *optimizer]) - own
        early = {key: one for key, one in self._of(gradients).items() if one.born <= self.peak_at}
        there = sum(one.num_bytes for one in early.values())
        rest = self.peak - own - state - there
        return Memory(own, state, there, rest, self._bytes(gradients))

    def _of(self, tensors: Sequence[Tensor]) -> dict[int, _Storage]:
        keys = {one.untyped_storage()._cdata for one in tensors}
        return {key: self.storages[key] for key in keys if key in self.storages}

    def _bytes(self, tensors: Sequence[Tensor]) -> int:
        return sum(one.num_bytes for one in self._of(tensors).values())

    def _forget(self, key: int) -> None:
        gone = self.storages.pop(key, None)
        if gone is not None:
            self.total -= gone.num_bytes

    def _look(self) -> None:
        if self.total > self.peak:
            self.peak, self.peak_at = self.total, self.clock


# -- operations --------------------------------------------------------------------------------


class _FakeRank(FakeTensorMode):
    """Fake tensors of floating point beside real host integers; notes every operation."""

    def __init__(self, watch: _Allocations, events: list[Event]) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._watch, self._events = watch, events
        self._is_inside = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is _DEVICE:
            # More than half of all calls, and no operation.
            return super().__torch_dispatch__(func, types, args, kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if func is aten.is_set_to.default:
            return _is_same_view(*given)
        if not any(isinstance(one, FakeTensor) for one in given):
            if _is_integral(func, args, kwargs, given):
                with unset_fake_temporarily():
                    return func(*args, **kwargs)
        elif func is aten.index_add_.default and not isinstance(args[0], FakeTensor):
            # How many tokens each expert gets is counted so.
            return _spread_evenly(args[0], args[2].numel())
        if self._is_inside:
            # Of what makes shapes of an operation by other ones, which the real one does not do.
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._is_inside = True
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._is_inside = False
        self._watch.see(result)
        self._note(func, args, kwargs, given, result)
        return result

    def _note(
        self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], result: Any
    ) -> None:
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        if getattr(func, "is_view", False) or func.namespace == "prim" or func in _EMPTY:
            return
        if not (given or func in _FILLS):
            return
        counts = _FLOPS.get(func.overloadpacket)
        flops = 0 if counts is None else int(counts(*args, **kwargs, out_val=result))
        # What returns nothing writes what it is given, such as the optimizer.
        touched = (*given, *(made or given))
        floats = [one.dtype for one in touched if one.is_floating_point()]
        dtype, num_bytes = (floats or [torch.int64])[0], sum(one.nbytes for one in touched)
        call = OperationCall.of(func, args, kwargs)
        self._events.append(Computed(dtype, flops, num_bytes, call))


_DEVICE = torch.ops.prim.device.default
_EMPTY = frozenset({aten.empty_like.default, aten.new_empty.default, aten._unsafe_view.default})
_FILLS = frozenset({aten.zeros.default, aten.ones.default, aten.full.default})


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    found: int = sdpa_flop_count(query.shape, key.shape, value.shape)
    return found


def _attention_backward_flops(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    found: int = sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)
    return found


_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    # torch counts those of GPUs alone.
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def _is_integral(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor]
) -> bool:
    """Whether an operation without a fake input makes integers."""
    dtype = kwargs.get("dtype")
    if dtype is not None and dtype.is_floating_point:
        return False
    if given:
        return not any(one.is_floating_point() for one in given)
    return dtype is not None or (
        func.overloadpacket is aten.arange and all(isinstance(one, int) for one in args)
    )


def _is_same_view(one: Tensor, other: Tensor) -> bool:
    """`Tensor.is_set_to`, which fake tensors do not have."""
    places = [
        (x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()) for x in (one, other)
    ]
    return places[0] == places[1]


def _spread_evenly(counts: Tensor, total: int) -> Tensor:
    """`counts` with as even a share of `total` in each place as there is."""
    with unset_fake_temporarily():
        counts.fill_(total // len(counts))
        counts[: total % len(counts)] += 1
    return counts
