"""Models, the gradients they must get, and one forward and backward of them in each form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from fsdp_bench.settings import Form, Fsdp2Form, OurForm, Widths
from pcomm.core.collectives.distributed import DistributedCollectives, Issued
from pcomm.core.collectives.protocol import Call, Collectives, Pending
from pcomm.core.groups.group import Group
from pcomm.core.testing.assertions import assert_as_accurate
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.fsdp2_communicators import OwnReduceScatter, separate_communicators
from pcomm.fsdp.settings import CommPolicy, Roles
from pcomm.fsdp.sharded import Sharded

# N ranks, R rows, D width, S sequences, T tokens, H heads, E width of a head

_NUM_TOKENS, _NUM_HEADS = 32, 4
# The largest loss of precision against plain torch that a check lets pass; sums over ranks and
# over rows are added in another order, and an error in communication is larger by magnitudes.
_FACTOR = 4.0


def make(form: Form, problem: BenchModel, groups: Mapping[str, Group]) -> Training:
    """A new model in a form. Collective over the groups.

    Args:
        form: The form of the model.
        problem: The model.
        groups: Groups of the same ranks by what they are for: `"gather"`, `"reduce"` and
            `"other rail"`.
    """
    if isinstance(form, OurForm):
        return _make_ours(form, problem, groups)
    return _make_theirs(form, problem, groups)


def _make_ours(form: OurForm, problem: BenchModel, groups: Mapping[str, Group]) -> Training:
    gather, reduce = groups["gather"], groups[form.reduce_on]
    if not form.has_pairs:
        gather, reduce = (one.with_collectives(_without_pairs(one)) for one in (gather, reduce))
    comm = CommPolicy(prefetch=form.prefetch, prefetch_backward=form.prefetch_backward)
    return Sharding(problem, gather, reduce, comm)


def _make_theirs(form: Fsdp2Form, problem: BenchModel, groups: Mapping[str, Group]) -> Training:
    own = groups["gather"]
    assert own.process_group is not None
    reduce: Group | None = None if form.reduce == "torch" else groups[form.reduce_on]
    if reduce is not None and form.reduce == "all-to-all":
        reduce = reduce.with_collectives(_without_pairs(reduce))
    return Fsdp2(
        problem,
        own.process_group,
        gather=own if form.gather == "pairs" else None,
        reduce=reduce,
        prefetch=form.prefetch,
        waits_for_reduce=form.waits_for_reduce,
        num_kept=form.num_kept,
    )


def _without_pairs(group: Group) -> WithoutPairs:
    assert group.process_group is not None
    return WithoutPairs(group.process_group)


class BenchLayer(nn.Module):
    """A matrix and a ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x_RD: Tensor) -> Tensor:
        """The next layer's input."""
        y_RD: Tensor = F.relu(self.linear(x_RD))
        return y_RD


class BenchBlock(nn.Module):
    """A block of a transformer: causal attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_RD: Tensor) -> Tensor:
        """The next block's input."""
        rows, width = x_RD.shape
        num_tokens = min(_NUM_TOKENS, rows)
        qkv = self.qkv(self.norm_1(x_RD)).view(-1, num_tokens, 3, _NUM_HEADS, width // _NUM_HEADS)
        q_SHTE, k_SHTE, v_SHTE = qkv.permute(2, 0, 3, 1, 4)
        mixed_SHTE = F.scaled_dot_product_attention(q_SHTE, k_SHTE, v_SHTE, is_causal=True)
        x_RD = x_RD + self.output(mixed_SHTE.transpose(1, 2).reshape(rows, width))
        y_RD: Tensor = x_RD + self.down(F.gelu(self.up(self.norm_2(x_RD))))
        return y_RD


@dataclass(frozen=True)
class BenchModel:
    """A model, a batch for each rank, and a loss; the same numbers in every process.

    Args:
        name: One of `settings.MODELS`.
        widths: Sizes.
    """

    name: str
    widths: Widths

    @property
    def unit(self) -> type[BenchLayer] | type[BenchBlock]:
        """The class of the modules that are sharded one by one."""
        return BenchLayer if self.name == "linear" else BenchBlock

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Sequential:
        """A new model."""
        model = nn.Sequential(*(self.unit(self.widths.width) for _ in range(self.depth)))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    # So that what goes through many layers neither grows nor vanishes.
                    std = (2 / parameter.shape[1]) ** 0.5
                    parameter.normal_(std=std, generator=generator)
            for module in model.modules():
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()
        return model.to(dtype)

    @property
    def depth(self) -> int:
        """Number of units."""
        return self.widths.depth

    def batch(self, rank: int, *, rows: int | None = None) -> Tensor:
        """The rows of a rank, `[R, D]`; those of every rank differ."""
        generator = torch.Generator().manual_seed(1 + rank)
        return torch.randn(rows or self.widths.rows, self.widths.width, generator=generator)

    def loss(self, model: nn.Module, batch_RD: Tensor) -> Tensor:
        """A number; the mean over ranks is that over all rows."""
        loss: Tensor = model(batch_RD).square().mean()
        return loss

    def unit_bytes(self) -> list[int]:
        """Bytes of each unit's parameters."""
        model = self.build()
        return [sum(p.nbytes for p in unit.parameters()) for unit in model]

    def gradients(self, control: Collectives, dtype: torch.dtype) -> dict[str, Tensor]:
        """Gradients of autograd for all rows: the mean over ranks, by the parameter's name.

        Collective; each rank computes its own rows, with a whole model.
        """
        model = self.build(dtype)
        self.loss(model, self.batch(control.rank).to(dtype)).backward()
        found = {}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found[name] = control.all_reduce(parameter.grad).div_(control.size)
        return found


@dataclass(frozen=True)
class Reference:
    """Gradients that a training must have.

    Args:
        plain: Gradients of plain torch in fp32.
        exact: Gradients of plain torch in fp64.
        num_ranks: Ranks over which they are the mean.
    """

    plain: dict[str, Tensor]
    exact: dict[str, Tensor]
    num_ranks: int

    @classmethod
    def of(cls, problem: BenchModel, control: Collectives) -> Reference:
        """Those of a problem. Collective."""
        plain, exact = (problem.gradients(control, d) for d in (torch.float32, torch.float64))
        return cls(plain, exact, control.size)

    def check(self, found: dict[str, Tensor]) -> None:
        """Compare.

        Raises:
            AssertionError: They are not about as close to fp64 as plain torch's are in fp32.
        """
        assert found.keys() == self.exact.keys(), f"{sorted(found)} and {sorted(self.exact)}"
        for name, value in found.items():
            try:
                assert_as_accurate(
                    value,
                    self.plain[name],
                    self.exact[name],
                    factor=_FACTOR,
                    num_terms=self.num_ranks,
                )
            except AssertionError as problem:
                raise AssertionError(f"gradient of {name}: {problem}") from problem


def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all numbers, in fp64."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        total += gradient.as_subclass(Tensor).double().square().sum()
    return total


class Training(ABC):
    """A model that is ready to be trained.

    Attributes:
        model: The module that is called.
    """

    model: nn.Module

    @property
    def num_backward_gathers(self) -> int:
        """Units that are gathered again in backward; known after the first step."""
        return 0

    @abstractmethod
    def whole_gradients(self) -> dict[str, Tensor]:
        """Gradients as a model in one process has them. Collective."""

    def finish_backward(self) -> None:  # noqa: B027
        """Wait for what backward has left under way; most leave nothing. Local."""

    def shard_gradients(self) -> list[Tensor]:
        """The gradients of this rank's parameters, each of which must have one. Local."""
        found = [parameter.grad for parameter in self.model.parameters()]
        kept = [gradient for gradient in found if gradient is not None]
        assert len(kept) == len(found), "a step left a parameter without a gradient"
        return kept

    def forget_gradients(self) -> None:
        """As an optimizer's `zero_grad`. Local."""
        self.model.zero_grad()


class Unsharded(Training):
    """A model in one process, which sends nothing."""

    def __init__(self, problem: BenchModel) -> None:
        self.model = problem.build()

    def whole_gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


class Sharding(Training):
    """A model sharded by `pcomm.fsdp`.

    Args:
        problem: The model.
        gather: Group that gathers.
        reduce: Group that reduces; `gather` for one communicator.
        comm: Depths; the usual ones if None.

    Attributes:
        sharded: The shards of the model, and its schedule.
    """

    def __init__(
        self, problem: BenchModel, gather: Group, reduce: Group, comm: CommPolicy | None = None
    ) -> None:
        self.sharded: Sharded = fully_shard(
            problem.build(), Roles(gather, reduce), units=[problem.unit], comm=comm or CommPolicy()
        )
        self.model = self.sharded.model

    @property
    def num_backward_gathers(self) -> int:
        schedule = self.sharded.schedule
        assert schedule is not None
        steps = schedule.steps
        return sum(step.kind == "gather" and step.phase == "backward" for step in steps)

    def whole_gradients(self) -> dict[str, Tensor]:
        return self.sharded.full_gradients()

    def forget_gradients(self) -> None:
        self.sharded.zero_grad()


def run_step(training: Training, problem: BenchModel, batch_RD: Tensor) -> None:
    """Forward and backward, until every gradient is there. Collective over the training's ranks."""
    problem.loss(training.model, batch_RD).backward()
    training.finish_backward()


class Fsdp2(Training):
    """A model sharded by torch; the defaults are FSDP2 as shipped.

    Args:
        problem: The model.
        group: Its communicator.
        gather: Group of the gathers in place of torch's; None for torch's.
        reduce: Group of the reduces in place of torch's; None for torch's.
        prefetch: Units gathered ahead, by explicit lists; 0 leaves that to torch, which waits for
            each gather on a CPU.
        waits_for_reduce: True to wait for `reduce` before the next unit computes, False after the
            next one was issued. Torch's own is always waited for on a CPU.
        num_kept: Last units that stay gathered from forward to backward.
    """

    def __init__(
        self,
        problem: BenchModel,
        group: dist.ProcessGroup,
        *,
        gather: Group | None = None,
        reduce: Group | None = None,
        prefetch: int = 0,
        waits_for_reduce: bool = True,
        num_kept: int = 0,
    ) -> None:
        model = problem.build()
        mesh = DeviceMesh.from_group(group, "cpu")
        for unit in model:
            torch_fully_shard(unit, mesh=mesh)
        torch_fully_shard(model, mesh=mesh)
        self.model = model
        # As shipped it gathers the unit again that it has just released.
        self._num_backward_gathers = problem.depth - num_kept
        assert isinstance(model, FSDPModule)
        if gather is not None or reduce is not None:
            separate_communicators(model, gather=gather, reduce=reduce)
        self._late: _LateReduceScatter | None = None
        if reduce is not None and not waits_for_reduce:
            self._late = _LateReduceScatter(reduce)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_reduce_scatter(self._late)  # type: ignore[arg-type]
        units: list[Any] = list(model)
        for unit in units[problem.depth - num_kept :]:
            unit.set_reshard_after_forward(False)
        if prefetch:
            _prefetch(model, units, prefetch, num_kept)

    @property
    def num_backward_gathers(self) -> int:
        return self._num_backward_gathers

    def finish_backward(self) -> None:
        if self._late is not None:
            self._late.finish()

    def shard_gradients(self) -> list[Tensor]:
        return [x.to_local() if isinstance(x, DTensor) else x for x in super().shard_gradients()]

    def whole_gradients(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            found[name] = parameter.grad.full_tensor()
        return found


class _LateReduceScatter(OwnReduceScatter):
    """Our reduce-scatter, the last of which is under way until `finish`.

    Torch looks at the result only to make views of it, as long as it has neither to convert nor to
    add it to an earlier one, which no model here needs.
    """

    _last: tuple[Pending, Tensor, bool] | None = None

    def _reduce(self, output: Tensor, x: Tensor, *, is_mean: bool) -> None:
        pending = self._collectives.reduce_scatter_async(x, out=output)
        # The new one is in the queue before the older one is waited for, as in pcomm.
        self.finish()
        self._last = pending, output, is_mean

    def finish(self) -> None:
        """Wait for the last one."""
        if self._last is not None:
            (pending, output, is_mean), self._last = self._last, None
            pending.wait()
            if is_mean:
                output.div_(self._collectives.size)


def _prefetch(root: FSDPModule, units: Sequence[Any], depth: int, num_kept: int) -> None:
    """Everything FSDP2 offers so that gathers go on during computation on the CPU."""
    root._set_unshard_async_op(True)
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + depth])
        # Units that stay from forward to backward need no gather: those before them come next.
        again = units[: min(place, len(units) - num_kept)]
        unit.set_modules_to_backward_prefetch(list(reversed(again))[:depth])


class WithoutPairs(DistributedCollectives):
    """Collectives of a gloo group that move the same bytes as pcomm's, and never between pairs.

    A reduce-scatter is an all-to-all and a local sum, since torch's moves twice the bytes.

    Args:
        process_group: A group with a gloo backend that this rank belongs to.
    """

    is_seen_by_host = True

    def _reduce_scatter(self, call: Call, is_async: bool) -> Issued:
        return self._exchange_and_add(call, is_async)
