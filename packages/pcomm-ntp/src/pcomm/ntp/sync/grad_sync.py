"""`GradSync`: gradients of replicas with different tensor-parallel degrees, summed in backward."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor, nn

from pcomm.core.control.agreement import agree_in_group
from pcomm.core.errors import ClosedError, ConfigError, TopologyError, UnsupportedError
from pcomm.core.groups.open_groups import Groups
from pcomm.core.tensor_parallel.split import ParamLayout, param_layouts_of
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.sync.buckets import BatchWeights, BucketQueue
from pcomm.ntp.sync.grad_groups import ALL, Strategy, group_names
from pcomm.ntp.sync.params import ModelGuard, SyncedParam, synced_params
from pcomm.ntp.sync.sums import NormSlots, SumPlan, canonical_norm

__all__ = ["GradSync"]


class GradSync:
    """Sums the gradients of a model over all replicas, whatever the degree of each.

        sync = GradSync(plan, model, groups, rank=rank)
        for inputs in batches:
            with sync.accumulate(weight=tokens / all_tokens):
                loss_of(model, inputs).backward()
            sync.finish()
            sync.clip_grad_norm_(1.0)
            optimizer.step()
            sync.zero_grad()

    Making one is collective over all used ranks. Afterwards `.grad` of every parameter that trains
    is the sum over replicas, with the same bits in each of them. A parameter that no backward has
    reached has a gradient of zeros then, so that an optimizer treats it alike on all ranks.

    Gradients are added up locally over the micro-batches of a step: `.grad` then has their weighted
    sum, divided by the first weight. In the last one each bucket is packed when its last gradient
    arrives, and its sums start while backward goes on. A gradient that is changed from there on is
    an error of `finish`; only writes through `.data` go unnoticed, and are lost.

    A replicated parameter's gradient is taken from the first rank of each tensor-parallel group,
    or from all of them where `ParamLayout.has_partial_gradient` says that each has a part.

    `torch.nn.utils.clip_grad_norm_` sees this rank's shards only and scales each rank by another
    number, which this object does not notice: use its own `clip_grad_norm_`. With
    `torch.amp.GradScaler` call `unscale_` of this object, so that all ranks skip a step together.

    Buffers of the sums, as large as the gradients in `reduce_dtype`, are kept between steps.

    Args:
        plan: Plan of the job, equal on all ranks.
        model: Model whose split parameters lie as the plan says; each pipeline stage has its own.
        groups: Open groups, with those of `grad_groups(plan, strategy)` among them. Closing or
            abandoning them closes this object. Several objects may share them, if their last
            micro-batches come one after another, in one order on all ranks.
        rank: Global rank of this process.
        strategy: `"interval"` sums each range of units over the ranks that hold it. With
            `"gather-core"` each tensor-parallel group first exchanges its gradients to as many
            ranks as the least degree has, and takes them back afterwards.
        param_layouts: Layout of each parameter by its name; by default those that the model's
            layers declare.
        bucket_bytes: Size of a bucket at which its sums may start, in bytes.
        reduce_dtype: Data type of the sums; by default that of the gradients, and fp32 for those
            of 16 bits.

    Raises:
        ConfigError: The rank is idle, or an argument cannot be used.
        TopologyError: The groups are not those of the plan and the strategy.
        LayoutError: A split parameter without units, or one that lies otherwise than planned.
        UnsupportedError: A model of torch's own parallelism: DDP, FSDP, DTensor.
        DivergenceError: Ranks differ in the plan, an argument, or in the names, order, shapes or
            types of the parameters; on every rank, naming the first difference.
        PeerError: Another rank has one of these errors.
    """

    def __init__(
        self,
        plan: NtpPlan,
        model: nn.Module,
        groups: Groups,
        *,
        rank: int,
        strategy: Strategy = "interval",
        param_layouts: Mapping[str, ParamLayout] | None = None,
        bucket_bytes: int = 32 * 2**20,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        params, sums = _agreed_params(
            plan,
            model,
            groups,
            rank=rank,
            strategy=strategy,
            param_layouts=param_layouts,
            bucket_bytes=bucket_bytes,
            reduce_dtype=reduce_dtype,
        )
        self._all, self._params = groups[ALL], params
        self._slots = NormSlots(plan, rank)
        self._guard = ModelGuard(model, params)
        self._weights = BatchWeights(params, self._guard)
        full_degree = max(1, plan.topology.axes["tp"])
        self._queue = BucketQueue(params, sums, strategy, bucket_bytes, full_degree)
        self._device = params[0].parameter.device if params else torch.device("cpu")
        self._state = "collecting"
        self._has_begun = self._is_inside = self._is_last = False
        self._hooks = [
            one.parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), index))
            for index, one in enumerate(params)
        ]
        this = weakref.ref(self)
        self._take_back = groups.before_close(lambda: _close(this), is_local=True)

    # -- a step ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulate(self, *, is_last: bool = True, weight: float = 1.0) -> Iterator[None]:
        """Run one backward inside. Local, but for the sums that the last one starts.

        In the last one all sums of the step are started, those of parameters that no backward has
        reached at its end. All used ranks of a stage have one, if need be an empty one.

        Args:
            is_last: True for the last micro-batch of a step.
            weight: Factor of this micro-batch's gradients in the sum over replicas, the same on
                the ranks of a tensor-parallel group: its tokens over those of all replicas, if the
                loss is a mean over its tokens; 1 if the loss is divided already.

        Raises:
            ConfigError: A weight that is not a number of at least 0, another order of calls, a
                gradient other than zeros before the first micro-batch of a step, or a model that
                has changed.
            ClosedError: It was closed, or an earlier step ended by an error.
            PeerError: Another rank failed, where the groups' collectives tell.
        """
        asked = "GradSync.accumulate"
        self._check_open(asked)
        if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight >= 0):
            raise _bad_argument("weight", weight, "a finite number of at least 0")
        if self._is_inside:
            raise _wrong_turn(asked, "an accumulate() around it", "Leave that one first.")
        if self._state == "last":
            fix = "Call finish(), or give is_last=False to all but the last micro-batch."
            raise _wrong_turn(asked, "a step whose last micro-batch has been", fix)
        if self._state == "torn":
            raise _wrong_turn(asked, "a step that ended by an error", "Call zero_grad().")
        is_first = not self._has_begun
        if is_first:
            self._guard.check_model()
            self._guard.check_cleared()
            self._begin()
        self._weights.take(weight, is_first=is_first)
        self._has_begun = True
        self._is_inside, self._is_last = True, is_last
        try:
            yield
            if is_last:
                # Not in finish(): what a caller sends meanwhile over the same groups, another
                # GradSync's sums or a loss, would come before them on some ranks only.
                self._queue.start_others(self._weights.of_sums)
        except BaseException:
            self._state = "broken" if self._queue.has_started else "torn"
            raise
        finally:
            self._is_inside = self._is_last = False
        if is_last:
            self._state = "last"

    def finish(self) -> None:
        """Wait for the sums, and write them into `.grad`. Collective over the stage's used ranks.

        Raises:
            ConfigError: No last micro-batch has been, it was called already, or a gradient was
                changed after its sum had been started.
            ClosedError: It was closed, or an earlier step ended by an error.
            PeerError: Another rank failed, where the groups' collectives tell.
        """
        asked = "GradSync.finish"
        self._check_open(asked)
        if self._is_inside:
            raise _wrong_turn(asked, "an accumulate() around it", "Leave that one first.")
        if self._state != "last":
            is_done = self._state == "summed"
            found = "gradients that are summed already" if is_done else "no last micro-batch"
            fix = "Call it once, after `with sync.accumulate(is_last=True):` around backward."
            raise _wrong_turn(asked, found, fix)
        try:
            # Training cannot go on with gradients of inference mode, which may be on here.
            with torch.inference_mode(False), torch.no_grad():
                self._queue.finish()
        except BaseException:
            self._state = "broken"
            raise
        self._state, self._has_begun = "summed", False

    def zero_grad(self) -> None:
        """Drop the gradients of all parameters of the step. Local.

        Raises:
            ConfigError: Sums are in flight, which finish() waits for.
            ClosedError: It was closed, or an earlier step ended by an error.
        """
        self._check_open("GradSync.zero_grad")
        if self._is_inside or self._state == "last":
            found = "gradients that are about to be summed"
            raise _wrong_turn("GradSync.zero_grad", found, "Call finish() first.")
        for one in self._params:
            one.parameter.grad = None
        self._begin()

    # -- norm --------------------------------------------------------------------------------

    def grad_norm(self) -> Tensor:
        """The 2-norm of all summed gradients, of every stage. Collective over all used ranks.

        Each element counts once, as one replica has it: the same bits on all ranks. A number in
        fp64 on the device of the parameters, infinite or NaN everywhere if a gradient is anywhere.

        Raises:
            ConfigError: The gradients are not summed.
            ClosedError: It was closed, or an earlier step ended by an error.
        """
        return self._norm("GradSync.grad_norm")

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`. Collective.

        It uses the formula of `torch.nn.utils.clip_grad_norm_`, with the canonical norm.

        Args:
            max_norm: Largest norm that is left as it is.

        Returns:
            The norm before, as `grad_norm` has it.

        Raises:
            ConfigError: The gradients are not summed.
            ClosedError: It was closed, or an earlier step ended by an error.
        """
        norm = self._norm("GradSync.clip_grad_norm_")
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for _, gradient in self._gradients():
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for dtype, gradients in by_dtype.items():
            torch._foreach_mul_(gradients, scale.to(dtype))
        return norm

    def unscale_(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Divide the summed gradients by the scaler's scale, in place of `scaler.unscale_`.

        Collective over all used ranks: what one rank finds not finite makes `scaler.step` skip the
        step on all of them.

        Args:
            scaler: Scaler of the loss, of equal scale on all ranks.
            optimizer: Optimizer of this model's parameters.

        Raises:
            ConfigError: The gradients are not summed.
            ClosedError: It was closed, or an earlier step ended by an error.
        """
        self._check_summed("GradSync.unscale_")
        scaler.unscale_(optimizer)
        # As torch's own scaler for shards does it; there is no public name for them.
        for found in scaler._found_inf_per_device(optimizer).values():
            self._all.collectives.all_reduce(found, op="max", out=found)

    # -- its end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Remove all hooks and drop the buffers. Local; again does nothing."""
        self._state = "closed"
        self._take_back()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._weights.close()
        self._queue.forget()

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        """Refuse to be copied.

        Raises:
            UnsupportedError: Always.
        """
        raise _not_copied("copy.deepcopy: GradSync")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be pickled.

        Raises:
            UnsupportedError: Always.
        """
        raise _not_copied("pickle: GradSync")

    # -- how it is done ----------------------------------------------------------------------

    def _arrived(self, index: int) -> None:
        """The gradient of a parameter was added to, in backward."""
        one = self._params[index]
        if not self._is_inside:
            raise _wrong_turn(
                f"backward: gradient of {one.name!r}",
                "a backward outside of accumulate(), which has added to the gradient",
                "Call zero_grad(), and run backward inside `with sync.accumulate():`.",
            )
        gradient = one.parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            # Those of `nn.Embedding(sparse=True)`; a sum over ranks needs all rows.
            one.parameter.grad = gradient.to_dense()
        if self._is_last:
            self._queue.arrived(index, self._weights.of_sums)

    def _norm(self, asked: str) -> Tensor:
        self._check_summed(asked)
        over = self._all.collectives
        return canonical_norm(self._gradients(), self._slots, over, self._device)

    def _gradients(self) -> list[tuple[SyncedParam, Tensor]]:
        """Parameters and gradients, but for those that a caller has dropped since."""
        return [(one, g) for one in self._params if (g := one.parameter.grad) is not None]

    def _begin(self) -> None:
        self._state, self._has_begun = "collecting", False
        self._queue.begin()

    def _check_open(self, asked: str) -> None:
        if self._state == "closed":
            raise ClosedError(
                asked,
                found="a GradSync that was closed, or whose groups were",
                why="Its hooks are gone, so gradients would stay those of this rank alone.",
                fix="Make another one with open groups, and close it after the last step.",
            )
        if self._state == "broken":
            raise ClosedError(
                asked,
                found="a step that ended by an error while sums were in flight",
                why="Other ranks may have, or not have, the sums that this rank has given up.",
                fix="Close it, and make another one with groups opened anew.",
            )

    def _check_summed(self, asked: str) -> None:
        self._check_open(asked)
        if self._state != "summed":
            raise _wrong_turn(asked, "gradients that are not summed", "Call finish() before it.")


def _agreed_params(
    plan: NtpPlan,
    model: nn.Module,
    groups: Groups,
    *,
    rank: int,
    strategy: Strategy,
    param_layouts: Mapping[str, ParamLayout] | None,
    bucket_bytes: int,
    reduce_dtype: torch.dtype | None,
) -> tuple[list[SyncedParam], SumPlan]:
    """The parameters of this rank that train, and the groups of their sums. Collective.

    Arguments and errors are those of `GradSync`, which calls it on all used ranks.
    """
    if plan.place(rank).is_idle:
        raise ConfigError(
            f"GradSync: rank {rank}",
            found="a rank that the plan does not use",
            why="An idle rank holds no units and is in none of the groups that sum gradients.",
            fix="Make no model and no GradSync where plan.place(rank).is_idle.",
        )
    everyone = groups[ALL]
    lines = [*plan.agreed_lines(), f"strategy: {strategy}", f"bucket_bytes: {bucket_bytes}"]
    agree_in_group(everyone, "GradSync: plan", lines)
    error: Exception | None = None
    names: dict[tuple[int, ...], str] = {}
    params: list[SyncedParam] = []
    try:
        if not bucket_bytes > 0:
            raise _bad_argument("bucket_bytes", bucket_bytes, "a size of at least 1 byte")
        names = group_names(plan, strategy)
        for ranks, name in names.items():
            if rank in ranks:
                _check_group(groups, name, ranks, rank)
        layouts = param_layouts_of(model) if param_layouts is None else param_layouts
        params = synced_params(plan, model, rank, layouts, reduce_dtype)
    except Exception as problem:
        error = problem
    agree_in_group(everyone, "GradSync: model", [], error=error)
    sums = SumPlan(plan, rank, names, lambda ranks: groups[names[ranks]])
    # Each stage has parameters of its own.
    stage = sums.open_group(sums.stage_ranks)
    agree_in_group(stage, "GradSync: parameters", [one.agreed for one in params])
    return params, sums


def _check_group(groups: Groups, name: str, ranks: tuple[int, ...], rank: int) -> None:
    found = "no such group is open"
    if name in groups:
        group = groups[name]
        if group.ranks == ranks and group.ranks[group.rank] == rank:
            return
        found = f"an open group of {list(group.ranks)}, in which this is {group.rank}"
    raise TopologyError(
        f"GradSync: group {name!r} of ranks {list(ranks)}",
        found=found,
        why="Gradients are summed over the groups that the plan and the strategy name.",
        fix="Give grad_groups(plan, strategy) to open_groups, with the plan and the strategy given "
        "here.",
    )


def _hook(sync: weakref.ref[GradSync], index: int) -> Callable[[Tensor], None]:
    # A parameter keeps its hooks, and may live longer.
    def arrived(_: Tensor) -> None:
        found = sync()
        if found is not None:
            found._arrived(index)

    return arrived


def _close(sync: weakref.ref[GradSync]) -> None:
    found = sync()
    if found is not None:
        found.close()


def _bad_argument(name: str, value: object, needed: str) -> ConfigError:
    """A number that cannot be used."""
    return ConfigError(
        f"GradSync: {name}={value!r}",
        found=f"something other than {needed}",
        why="It is a size, or a factor of gradients.",
        fix=f"Give {name} as {needed}.",
    )


def _wrong_turn(asked: str, found: str, fix: str) -> ConfigError:
    """Calls in another order than accumulate, finish."""
    return ConfigError(
        asked,
        found=found,
        why="A step is: accumulate() around each backward, is_last=True for the last, finish().",
        fix=fix,
    )


def _not_copied(asked: str) -> UnsupportedError:
    """A copy of what belongs to one model and one process."""
    return UnsupportedError(
        asked,
        found="a GradSync, which has hooks on one model's parameters and groups of this process",
        why="A copy would sum the gradients of the same parameters once more.",
        fix="Copy the model, and make a GradSync for the copy.",
    )
