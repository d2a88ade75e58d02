"""A gradient of which this rank holds a shard, which torch's functions do not take for the whole.

Elementwise operations are right on shards and go through. A norm becomes that of the whole gradient
where `nn.utils.get_total_norm` puts the norms of all parameters together, which is where
`clip_grad_norm_` comes from. The check for overflow of `torch.amp.GradScaler` is that of all ranks.
Functions of several elements at once, which would see those of one rank alone, are an error: so is
the step of an optimizer that calls one (`torch_guards` looks at optimizers before their step).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pcomm.core.collectives.protocol import Pending, Reduction
from pcomm.core.errors import UnsupportedError
from pcomm.core.groups.group import Group

__all__ = ["ShardGroups", "mark_shard"]


class ShardGroups:
    """The groups that hold the other shards of one parameter group's gradients.

    Args:
        over: Groups of the ranks with other shards of the same gradients, or with other gradients
            of the parameter group.
        model_groups: All groups of the model, in the same order on all ranks.
        entire: Indices of the parameters that one rank holds entirely.
        complete: Waits for a collective, with a name for it in errors; a method of what refers to
            this, and so held weakly.

    Attributes:
        over: The groups of several ranks among them.
    """

    def __init__(
        self,
        over: Sequence[Group],
        model_groups: Sequence[Group],
        entire: frozenset[int],
        complete: Callable[[Pending, str], Tensor],
    ) -> None:
        self.over = tuple(one for one in over if one.size > 1)
        self._model_groups = tuple(one for one in model_groups if one.size > 1)
        self._entire, self._complete = entire, weakref.WeakMethod(complete)

    @property
    def has_peers(self) -> bool:
        """True if the model has other ranks; each of them has to skip a step if this one does."""
        return bool(self._model_groups)

    def is_entire(self, index: int) -> bool:
        """True if one rank holds all of parameter `index` of the group."""
        return index in self._entire

    def spread_overflow(self, flag: Tensor) -> None:
        """Make a flag the largest of all ranks of the model, in place. Collective over them.

        Twice where there are several groups, so that it reaches ranks that share none.
        """
        for _ in range(2 if len(self._model_groups) > 1 else 1):
            for group in self._model_groups:
                pending = group.collectives.all_reduce_async(flag, op="max", out=flag)
                self._end(pending, "unscale_ of a GradScaler, which every rank has to call")

    def combine(self, value: Tensor, op: Reduction) -> Tensor:
        """The sum or maximum of a part of a norm over `over`. Collective."""
        for group in self.over:
            pending = group.collectives.all_reduce_async(value, op=op)
            what = "clip_grad_norm_ or get_total_norm, which every rank has to call"
            value = self._end(pending, what)
        return value

    def _end(self, pending: Pending, what: str) -> Tensor:
        complete = self._complete()
        return pending.wait() if complete is None else complete(pending, what)


Origin = weakref.ReferenceType[ShardGroups]


def alive(origin: Origin) -> ShardGroups:
    """The origin of a gradient.

    Raises:
        UnsupportedError: The model is gone, and its groups with it.
    """
    found = origin()
    if found is None:
        raise UnsupportedError(
            "a gradient of a sharded model that is gone",
            found="no groups any more",
            why="The other shards are on other ranks.",
            fix="Keep the model as long as its gradients, or take full_gradients() before.",
        )
    return found


NORMS = frozenset({"norm", "vector_norm", "linalg_norm", "linalg_vector_norm"})
"""Names of torch's functions that return a norm."""


class ShardTensor(Tensor):
    """Has two class methods decide about every function of torch that gets one."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return what the class has instead of `func`, or its result as the class takes it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given: list[Any] = []
        for one in (*args, *kwargs.values()):
            given += one if isinstance(one, list | tuple) else [one]
        result = cls._instead_of(name, types, args, kwargs, given)
        if result is NotImplemented:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            result = cls._taken(name, result, args, given)
        return result

    @classmethod
    def _instead_of(
        cls,
        name: str,
        types: Collection[type],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        given: Sequence[Any],
    ) -> Any:
        """The result of something else; `NotImplemented` for the function itself; or an error."""
        raise NotImplementedError

    @classmethod
    def _taken(cls, name: str, result: Any, args: Sequence[Any], given: Sequence[Any]) -> Any:
        """The result of the function as the caller gets it, or an error."""
        raise NotImplementedError


def mixed_elements(name: str) -> UnsupportedError:
    """A function needs several elements of a gradient."""
    return UnsupportedError(
        f"torch: {name} of a gradient of a sharded model",
        found="a shard of the gradient: the rest is on other ranks",
        why="The result would be that of this rank's shard, and differ between ranks. An optimizer "
        "that needs it, such as LAMB or Shampoo, does not fit to shards.",
        fix="Use sharded.clip_grad_norm(), grad_norm() or full_gradients(); elementwise "
        "optimizers; or gradient.as_subclass(torch.Tensor) where this rank's shard is meant.",
    )


# fmt: off
_REFUSED = frozenset((
    "addbmm", "addmm", "addmv", "addr", "amax", "amin", "aminmax", "argmax", "argmin", "argsort",
    "baddbmm", "batch_norm", "bmm", "cdist", "cholesky", "cholesky_ex", "cond", "conv1d", "conv2d",
    "conv3d", "corrcoef", "cosine_similarity", "count_nonzero", "cov", "cross_entropy", "cummax",
    "cummin", "cumprod", "cumsum", "det", "diff", "dist", "dot", "eig", "eigh", "eigvals",
    "eigvalsh", "einsum", "frobenius_norm", "ger", "group_norm", "histc", "histogram",
    "histogramdd", "huber_loss", "inner", "inv", "inv_ex", "kthvalue", "l1_loss", "layer_norm",
    "linear", "log_softmax", "logcumsumexp", "logsumexp", "lstsq", "lu", "lu_factor", "matmul",
    "matrix_norm", "matrix_power", "matrix_rank", "mean", "median", "mm", "mode", "mse_loss",
    "msort", "multi_dot", "mv", "nanmean", "nanmedian", "nanquantile", "nansum", "normalize",
    "nuclear_norm", "outer", "pca_lowrank", "pdist", "pinv", "prod", "qr", "quantile", "renorm",
    "rms_norm", "slogdet", "smooth_l1_loss", "softmax", "softmin", "solve", "solve_ex", "sort",
    "std", "std_mean", "sum", "svd", "svd_lowrank", "svdvals", "tensordot", "topk", "trace",
    "unique", "unique_consecutive", "var", "var_mean", "vdot",
))
# fmt: on
"""Functions whose result mixes elements of a tensor, without what forms of them have around it."""

_SAME = frozenset({"__get__", "bfloat16", "clone", "contiguous", "detach", "double", "float", "to"})
"""Functions after which a gradient is still one, and no update that was made of it."""

_TOGETHER = frozenset({"cat", "concat", "concatenate", "hstack", "stack", "vstack"})
"""Functions that make one tensor of several, of which ranks hold different ones."""


class ShardGradient(ShardTensor):
    """This rank's shard of a gradient, in ordinary memory; `as_subclass(Tensor)` takes it as it is.

    Attributes:
        origin: The groups that hold the other shards.
        is_entire: True if one rank holds the whole gradient, and may look at all of it.
        is_computed: True if it is no gradient any more, but an update or an average, of which an
            optimizer for whole matrices takes the norm by itself.
    """

    origin: Origin
    is_entire: bool
    is_computed: bool

    @classmethod
    def _instead_of(
        cls,
        name: str,
        types: Collection[type],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        given: Sequence[Any],
    ) -> Any:
        if ShardNorm in types and any(
            isinstance(one, ShardNorm) and not one.is_entire for one in given
        ):
            raise mixed_elements("norm")
        is_cut = not all(one.is_entire for one in given if isinstance(one, ShardGradient))
        if name in NORMS and (is_cut or _is_of_all(name, *args, **kwargs)):
            return _norm(name, *args, **kwargs)
        if name == "_foreach_norm":
            return _norms(*args, **kwargs)
        if (name in _TOGETHER and any(map(_is_spread, given))) or (
            is_cut and _mixes_elements(name, args, kwargs)
        ):
            raise mixed_elements(name)
        return NotImplemented

    @classmethod
    def _taken(cls, name: str, result: Any, args: Sequence[Any], given: Sequence[Any]) -> Any:
        if name == "as_subclass":
            return result
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            first = next(one for one in given if isinstance(one, ShardGradient))
            alive(first.origin).spread_overflow(args[1])
        if name.startswith(("_foreach_", "_fused_")) and name.endswith("_"):
            # In place: what it has written to is what it was.
            return result
        if name.startswith("_foreach_") and isinstance(result, list | tuple):
            lists = [one for one in args if isinstance(one, list | tuple)]
            return [
                _like(name, one, [members[place] for members in lists])
                for place, one in enumerate(result)
            ]
        if isinstance(result, Tensor) and not any(result is one for one in given):
            return _like(name, result, given)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy that is a shard as well."""
        copy = self.detach().clone()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Without the guard: another process has other ranks."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def mark_shard(gradient: Tensor, origin: ShardGroups, index: int) -> Tensor:
    """The same memory as a `ShardGradient`; the gradient itself in a model of one rank. Local.

    A gradient without values, on the meta device or a fake tensor, has nothing to guard.

    Args:
        gradient: This rank's shard.
        origin: The groups that hold the other shards.
        index: Index of its parameter in the parameter group.
    """
    if not origin.has_peers or gradient.untyped_storage().device.type == "meta":
        return gradient
    return _marked(gradient, weakref.ref(origin), is_entire=origin.is_entire(index))


def _marked(gradient: Tensor, origin: Origin, *, is_entire: bool) -> ShardGradient:
    marked = gradient.as_subclass(ShardGradient)
    marked.origin, marked.is_entire, marked.is_computed = origin, is_entire, False
    return marked


def _like(name: str, result: Any, given: Sequence[Any]) -> Any:
    """The result of an elementwise function of a shard as a shard."""
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return result
    for one in given:
        if isinstance(one, ShardGradient) and one.numel() == result.numel():
            if isinstance(result, ShardGradient):
                return result
            marked = _marked(result, one.origin, is_entire=one.is_entire)
            marked.is_computed = one.is_computed or name not in _SAME
            return marked
    return result


def _is_spread(one: Any) -> bool:
    """True if other ranks hold other shards, or other gradients of its group.

    Not so for experts of which each rank has its own.
    """
    if not isinstance(one, ShardGradient):
        return False
    origin = one.origin()
    return origin is None or bool(origin.over)


def _mixes_elements(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if a result depends on several elements of one tensor."""
    for form in ("linalg_", "_foreach_"):
        name = name.removeprefix(form)
    # `__rmatmul__`, `__imatmul__`, and `addmm_`.
    name = "matmul" if name.endswith("matmul__") else name.rstrip("_")
    if name in ("max", "min"):
        # Of two tensors they do not.
        return sum(isinstance(one, Tensor) for one in (*args, *kwargs.values())) < 2
    return name in _REFUSED


# -- norms -------------------------------------------------------------------------------------


def _is_of_all(
    name: str, x: Any, ord: Any = None, dim: Any = None, *_: Any, p: Any = None, **__: Any
) -> bool:
    """True if a norm is that of all elements, seen as a vector."""
    order = p if ord is None else ord
    is_of_matrix = name == "linalg_norm" and order is not None
    return isinstance(x, ShardGradient) and dim is None and not is_of_matrix and order != "nuc"


def _norm(
    name: str, x: Any, ord: Any = None, *args: Any, p: Any = None, **kwargs: Any
) -> ShardNorm:
    """The norm of a shard, by `torch.norm`, `Tensor.norm` or `torch.linalg`'s functions."""
    if not _is_of_all(name, x, ord, *args, p=p, **kwargs) or kwargs.get("out") is not None:
        raise mixed_elements(f"{name} along dimensions")
    order = p if ord is None else ord
    return _norms([x], 2.0 if order in (None, "fro") else order, kwargs.get("dtype"))[0]


def _norms(
    tensors: Sequence[Tensor], ord: float = 2.0, dtype: torch.dtype | None = None
) -> list[ShardNorm]:
    order = float(ord)
    if not order > 0:
        raise mixed_elements(f"norm of order {order}")
    plain = [one.as_subclass(Tensor).detach() for one in tensors]
    # The largest of nothing is an error of torch's; a shard may be empty.
    filled = [one for one in plain if one.numel()]
    found = iter(torch._foreach_norm(filled, order, dtype) if filled else ())
    norms = []
    for one, own in zip(tensors, plain, strict=True):
        value = next(found) if own.numel() else own.new_zeros((), dtype=dtype or own.dtype)
        origin = one.origin if isinstance(one, ShardGradient) else None
        norm = ShardNorm.of(value, order, [origin])
        norm.is_entire = not _is_spread(one)
        if isinstance(one, ShardGradient) and one.is_entire and one.is_computed:
            norm.is_entire = True
        norms.append(norm)
    return norms


_MOVES = ("to", "cpu", "cuda", "double", "float", "detach")
"""Functions after which a norm is still one."""


class ShardNorm(ShardTensor):
    """Norms of shards, good for one thing: the norm of all of them together.

    Attributes:
        order: Order of the norm.
        origins: The origin of the shard behind each element; None for a whole tensor.
        is_entire: True if it is the norm of a whole gradient, which may be used alone, too.
    """

    order: float
    origins: list[Origin | None]
    is_entire: bool

    @classmethod
    def of(cls, value: Tensor, order: float, origins: list[Origin | None]) -> ShardNorm:
        """The norms `value` of shards of these origins. Local."""
        norm = value.as_subclass(cls)
        norm.order, norm.origins, norm.is_entire = order, origins, False
        return norm

    @classmethod
    def _instead_of(
        cls,
        name: str,
        types: Collection[type],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        given: Sequence[Any],
    ) -> Any:
        if name == "stack":
            return _stacked(*args, **kwargs)
        if name in NORMS and isinstance(args[0], ShardNorm):
            return _total(*args, **kwargs)
        return NotImplemented

    @classmethod
    def _taken(cls, name: str, result: Any, args: Sequence[Any], given: Sequence[Any]) -> Any:
        norms = [one for one in given if isinstance(one, ShardNorm)]
        if name in _MOVES:
            (norm,) = norms
            moved = cls.of(result, norm.order, norm.origins)
            moved.is_entire = norm.is_entire
            return moved
        if all(norm.is_entire for norm in norms):
            return result.as_subclass(Tensor) if isinstance(result, Tensor) else result
        if isinstance(result, Tensor) or name in ("item", "tolist", "__float__", "__bool__"):
            raise mixed_elements("norm")
        return result


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> ShardNorm:
    norms = [one for one in tensors if isinstance(one, ShardNorm)]
    origins = [one.origins[0] if isinstance(one, ShardNorm) else None for one in tensors]
    if any(one.dim() for one in tensors) or len({one.order for one in norms}) > 1:
        raise mixed_elements("stack of norms")
    values = torch.stack([one.as_subclass(Tensor) for one in tensors])
    return ShardNorm.of(values, norms[0].order, origins)


def _total(
    norms: ShardNorm,
    ord: Any = None,
    dim: Any = None,
    *_: Any,
    p: Any = None,
    dtype: torch.dtype | None = None,
    **__: Any,
) -> Tensor:
    """The norm over all ranks. Collective: one all-reduce for each set of groups, in fp64."""
    given = p if ord is None else ord
    order = 2.0 if given in (None, "fro") else float(given)
    if order != norms.order or dim is not None:
        raise mixed_elements(f"norm of order {given} of norms of order {norms.order}")
    powers = norms.as_subclass(Tensor).double().view(-1)
    powers = powers if math.isinf(order) else powers.pow(order)
    together: Callable[[Tensor], Tensor] = torch.amax if math.isinf(order) else torch.sum
    terms: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    owners: dict[tuple[tuple[int, ...], ...], ShardGroups | None] = {}
    for place, origin in enumerate(norms.origins):
        owner = None if origin is None else alive(origin)
        key = () if owner is None else tuple(group.ranks for group in owner.over)
        terms.setdefault(key, []).append(place)
        owners[key] = owner
    sums = []
    for key, places in terms.items():
        total, owner = together(powers[places]), owners[key]
        if owner is not None:
            total = owner.combine(total, "max" if math.isinf(order) else "sum")
        sums.append(total)
    whole = together(torch.stack(sums))
    whole = whole if math.isinf(order) else whole.pow(1 / order)
    return whole.to(dtype or norms.dtype)
