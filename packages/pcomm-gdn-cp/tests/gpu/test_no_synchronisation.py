"""With a prepared plan no layer waits for the GPU: neither forward nor backward reads a value.

On CUDA torch itself raises on what would wait; that has never run yet, because no GPU was at hand.
On the CPU the operations are counted that would wait there, which is what a test can show here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from core_support.dispatch_modes import NestedModes
from gdn_cp_support.planned_mixers import CHUNK, mixer, weights_of
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual
from pcomm.gdn_cp import AttentionSpec, GdnSpec, Mamba2Spec, Spec, make_plan

PACK, DIM, SIZE = (0, 48, 48, 96, 192, 240), 6, 2
CASES = [
    pytest.param(spec, strategy, id=f"{type(spec).__name__}-{strategy}")
    for spec in (GdnSpec(1, 4, 3, 5), Mamba2Spec(4, 3, 2, 5), AttentionSpec(4, 2, 4))
    for strategy in ("heads", "docs", "state", "gather")
    if strategy != "state" or spec.state
]
# They bring a value, or a number of elements that depends on values, to the host; and the last
# makes a tensor of host numbers, which on a GPU has to be copied there.
WAITING = {
    *("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default"),
    *("aten.masked_select.default", "aten.repeat_interleave.Tensor"),
    "aten.lift_fresh.default",
}


def steps(spec: Spec, strategy: Any, device: str) -> list[Callable[[], Tensor]]:
    """Forward and backward of one layer on each rank, whose plan is prepared."""

    def on_rank(collectives: VirtualCollectives) -> Callable[[], Tensor]:
        plan = make_plan(PACK, collectives, spec, strategy=strategy, hidden_dim=DIM)
        plan.prepare(device, chunk=CHUNK)
        weights = {
            name: value.detach().to(device).requires_grad_()
            for name, value in weights_of(spec, DIM, dtype=torch.float32).items()
        }
        hidden = torch.randn(PACK[-1] // SIZE, DIM, device=device, requires_grad=True)

        def step() -> Tensor:
            # Otherwise one thread runs the backward of all ranks of a GPU, and they wait for
            # each other.
            with torch.autograd.set_multithreading_enabled(False):
                y = mixer(plan, spec, hidden, weights)
                grads = torch.autograd.grad(
                    y, [hidden, *weights.values()], torch.ones_like(y), materialize_grads=True
                )
            return grads[0]

        # Not run once before: `prepare` has made every index tensor.
        return step

    return run_virtual(on_rank, SIZE)


class Waiting(TorchDispatchMode):
    """The operations of this thread that would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A number written into a slice is fresh too, without dimensions; on CUDA it is filled in.
        filled = str(func) == "aten.lift_fresh.default" and not args[0].dim()
        if str(func) in WAITING and not filled:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("spec", "strategy"), CASES)
def test_a_step_reads_no_value_on_the_host(spec: Spec, strategy: str) -> None:
    ready = steps(spec, strategy, "cpu")
    nested = NestedModes(SIZE)

    def on_rank(collectives: VirtualCollectives) -> list[str]:
        waiting = Waiting()
        with nested(collectives.rank, waiting):
            ready[collectives.rank]()
        return waiting.found

    assert run_virtual(on_rank, SIZE) == [[]] * SIZE
    assert not is_in_torch_dispatch_mode()


def test_the_check_sees_a_value_that_is_read() -> None:
    with Waiting() as waiting:
        x = torch.tensor([1.0, 0.0])
        assert x[x > 0].sum().item() == 1
    assert set(waiting.found) >= {"aten.lift_fresh.default", "aten._local_scalar_dense.default"}


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("spec", "strategy"), CASES)
def test_a_step_does_not_wait_for_the_gpu(spec: Spec, strategy: str) -> None:
    ready = steps(spec, strategy, "cuda")
    with no_waiting():
        grads = run_virtual(lambda collectives: ready[collectives.rank](), SIZE)
    assert all(torch.isfinite(grad).all() for grad in grads)
