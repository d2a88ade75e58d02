"""What the ranks of a session saw of a training run, compared with one process that trains it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ntp_support import small_training
from ntp_support.small_training import SmallModel, training_units
from pcomm.core.collectives import IdentityCollectives
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.redistribute import Moved
from pcomm.ntp.sync.owned_params import OwnedParams

__all__ = ["Seen", "SeenStep", "assert_seen", "dense_run", "state_of"]


@dataclass(frozen=True)
class SeenStep:
    """What a rank saw of one committed step.

    Args:
        step: Number of the step.
        replica: Coordinate of the rank on `dp`.
        first: First token of the replica.
        count: Number of tokens of the replica.
        loss: Mean nats of these tokens.
        norm: Norm of all gradients.
    """

    step: int
    replica: int
    first: int
    count: int
    loss: float
    norm: float


@dataclass
class Seen:
    """What a rank saw of a whole run.

    Args:
        steps: The steps that it committed, in order.
        states: By number of applied steps, the plan, as JSON, and by name the parameter and
            its moments.
        generations: Ranks of each generation that it was in.
        reasons: Reason for each of these generations.
        gone: Ranks that it saw go, with the reason that was told.
        rank: Rank that it had: of a spare, that whose place it took; -1 of one that took none.
        living: At the beginning of each attempt at each fifth step, numbers of the threads of this
            process, of its open files, of process groups and of living tensors.
        moved: Bytes of state that moved in each generation in which some did.
        owned: Elements of which it owns the optimizer's state in the end, and elements of its part
            of the model.
    """

    steps: list[SeenStep] = field(default_factory=list)
    states: dict[int, tuple[str, dict[str, tuple[Tensor, ...]]]] = field(default_factory=dict)
    generations: list[tuple[int, ...]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    gone: dict[int, str] = field(default_factory=dict)
    rank: int = -1
    living: list[tuple[int, int, int, int]] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    owned: tuple[int, int] = (0, 0)


def assert_seen(seen: Mapping[int, Seen], until: int, *, atol: float = 1e-12) -> None:
    """Assert that what surviving ranks saw is the training of the whole model by one process.

    Losses, norms, parameters and moments of each step; and no token is lost or repeated.

    Args:
        seen: Results of the ranks that are left, by rank.
        until: Number of steps.
        atol: Largest difference.
    """
    assert seen, "no rank is left"
    dense, losses, norms = dense_run(until)
    for rank, own in seen.items():
        assert [one.step for one in own.steps] == sorted({one.step for one in own.steps}), rank
        assert until in own.states, f"rank {rank} ended at {max(own.states)}"
        for applied, (text, tensors) in own.states.items():
            _assert_state(NtpPlan.from_json(text), rank, tensors, dense[applied], atol)
    for number in range(until):
        saw = [one for own in seen.values() for one in own.steps if one.step == number]
        by_replica = {one.replica: one for one in saw}
        for one in saw:
            assert abs(one.norm - norms[number]) <= atol
            # All ranks of a replica, and of all generations, had the same tokens.
            assert (one.first, one.count, one.loss) == (
                by_replica[one.replica].first,
                by_replica[one.replica].count,
                by_replica[one.replica].loss,
            )
        parts = sorted((one.first, one.count) for one in by_replica.values())
        if parts and sum(count for _, count in parts) == small_training._TOKENS:
            total = sum(one.loss * one.count for one in by_replica.values())
            assert abs(total / small_training._TOKENS - losses[number]) <= atol
        ends = [0, *(first + count for first, count in parts)]
        assert all(first >= end for (first, _), end in zip(parts, ends, strict=False))


def dense_run(until: int) -> tuple[list[dict[str, tuple[Tensor, ...]]], list[float], list[float]]:
    """Parameters and moments after 0 to `until` steps of one process; losses and norms of steps."""
    units = training_units()

    def layout(name: str) -> Layout:
        return units["fc1.*" if name.startswith("fc1") else name].layout(1)

    model = SmallModel(layout, IdentityCollectives())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    states, losses, norms = [state_of(model, optimizer)], [], []
    for step in range(until):
        loss = model(*small_training._batch(step))
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), small_training._MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        states.append(state_of(model, optimizer))
    return states, losses, norms


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, owned: OwnedParams | None = None
) -> dict[str, tuple[Tensor, ...]]:
    """Each parameter and, where there are any, its moments; copies.

    Args:
        model: The model.
        optimizer: Its optimizer.
        owned: What the rank owns; what it does not is NaN in the moments. None if it has all.
    """
    kept: dict[str, tuple[Tensor, ...]] = {}
    for name, parameter in model.named_parameters():
        part = None if owned is None else owned._parts[name]
        own = optimizer.state.get(parameter if part is None else part.own, {})
        moments = [own[key] for key in ("exp_avg", "exp_avg_sq", "momentum_buffer") if key in own]
        if part is not None:
            moments = [_spread(part, one) for one in moments]
        kept[name] = tuple(one.detach().clone() for one in (parameter, *moments))
    return kept


def _spread(part: Any, moment: Tensor) -> Tensor:
    whole = torch.full_like(part.whole.detach(), float("nan"))
    for one in part.held:
        into = part.boxes(whole, part.extent, (one,))
        for box, own in zip(into, part.boxes(moment, part.held, (one,)), strict=True):
            box.copy_(own)
    return whole


def _assert_state(
    plan: NtpPlan,
    rank: int,
    tensors: dict[str, tuple[Tensor, ...]],
    dense: dict[str, tuple[Tensor, ...]],
    atol: float,
) -> None:
    place = plan.place(rank)
    assert tensors.keys() == dense.keys()
    for name, own in tensors.items():
        units = plan.units_of(name)
        param_layout = ParamLayout()
        if units is not None:
            layout = plan.layout(units[0], place.replica)
            param_layout = ParamLayout(layout, 1 if name == "fc2.weight" else 0)
        for one, whole in zip(own, dense[name], strict=True):
            expected = small_training._own(whole, param_layout, place.index)
            # What the rank does not own.
            expected = expected.where(~one.isnan(), one)
            torch.testing.assert_close(one, expected, rtol=0, atol=atol, equal_nan=True)
            assert one is not own[0] or one.isfinite().all()
