"""Linear layers that are split by output or by input features, also over replaced weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import UnsupportedError
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.split import (
    ParamLayout,
    add_up,
    check_partition,
    check_rank_order,
    empty_parameters,
    enter,
    gather_replicated,
    gather_tokens,
    leave,
    room_for_sum,
    scatter_tokens,
    take_parameters,
)

__all__ = [
    "ColumnParallelLinear",
    "FastModule",
    "ReplaceableLinear",
    "RowParallelLinear",
    "WeightProduct",
    "check_no_gradient",
    "forget_weight",
]


class FastModule(nn.Module):
    """A module of one input that goes straight to `forward`, unless something is hooked to it.

    `nn.Module.__call__` and its look-up of parameters cost about as much as a small matrix
    product (rows in `docs/benchmarks`). A subclass sets `run` in its constructor to the one of
    its functions that fits its group. Hooks and `compile` work as on every module.
    """

    # A function of the class and not a bound method: that would tie a knot between the module and
    # itself, and a deleted model would keep its memory until the garbage collector comes.
    run: Callable[[Any, Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """What the module computes."""
        return self.run(self, x)

    def __call__(self, x: Tensor) -> Any:
        """`forward`, and the hooks where there are any."""
        # One look-up instead of five: each attribute of a module goes through its `__getattr__`.
        own = self.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "_compiled_call_impl" in own
            or _has_any_global_hook()
        ):
            return super().__call__(x)
        return self.forward(x)


class ReplaceableLinear(nn.Module):
    """A linear layer whose weight can be replaced by a `WeightProduct`. Local.

    From then on `to`, `half`, `cuda` and the like raise an `UnsupportedError` before they change
    the layer, unless they leave its dtype and device as they are. So does another parameter
    `weight`, which the product would not follow.
    """

    def check_conversion(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Refuse a function of each tensor that would convert a replaced weight. Local.

        Raises:
            UnsupportedError: The function gives another dtype or device.
        """
        sample = self.__dict__.get("_sample_of_weight")
        if sample is None:
            return
        found = fn(sample)
        if (found.dtype, found.device) != (sample.dtype, sample.device):
            raise UnsupportedError(
                f"a conversion to {found.dtype} on {found.device}",
                found=f"a linear layer whose weight of {sample.dtype} on {sample.device} was "
                "replaced by its packed or quantised form",
                why="That form has one dtype and one device.",
                fix="Load the model again, and convert it before its weights are replaced.",
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.check_conversion(fn)
        apply: Callable[..., Self] = super()._apply
        if "weight_product" not in self.__dict__:
            return apply(fn, recurse)
        own, weight = self._parameters, self._parameters.get("weight")
        if weight is None or not weight.is_meta:
            apply(fn, recurse)
            # The embedding's: torch may be told to put a new parameter in the place of the old one.
            self.__dict__["_stand_in"] = own.get("weight")
            return self
        # What torch does with memory it cannot do with a parameter that has none.
        own["weight"] = None
        try:
            return apply(fn, recurse)
        finally:
            own["weight"] = weight

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """See `nn.Module`; a replaced weight stays the parameter that it is."""
        if name == "weight" and "weight_product" in self.__dict__:
            if param is self._parameters.get("weight"):
                return
            raise _other_weight()
        super().register_parameter(name, param)


# Shape suffixes: T tokens, I input features, O output features; t, i, o one rank's shard.
class ColumnParallelLinear(ReplaceableLinear, FastModule):
    """`y = x W^T + b` where each rank holds some of the outputs.

    On one rank this is `F.linear` and nothing else. Otherwise collective: an all-gather of
    tokens under sequence parallelism, and a reduction of the input's gradient. Where no gradient
    is recorded there is no `autograd.Function` around either.

    Args:
        in_features: I, the number of inputs.
        layout: Layout of the O outputs; uneven shards and fused sections (queries, keys and
            values in one weight) are layouts like any other.
        collectives: Collectives of the tensor-parallel group, without gradients.
        bias: True adds a bias, split like the outputs.
        sequence_parallel: True if the input is this rank's shard of the tokens.
        gather_output: True gives every rank all outputs.
        initialise: False allocates this rank's parameters alone and leaves them as the memory was,
            for weights that are loaded; otherwise the whole weight is allocated first.
        device: Device of the parameters.
        dtype: Data type of the parameters.

    Shape: `[T, I]` (`[T / size, I]` under sequence parallelism) to `[T, o]`, or `[T, O]`
    gathered. Weight `[o, I]`, initialised like `nn.Linear` from the whole weight, so that ranks
    with equal random state hold parts of one weight.

    Raises:
        LayoutError: The layout is over another number of ranks, no partition, or, where the
            output is gathered, not in rank order.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    multiply: Callable[[Any, Tensor], Tensor]

    def __init__(
        self,
        in_features: int,
        layout: Layout,
        collectives: Collectives,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        initialise: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_partition("ColumnParallelLinear", layout, collectives)
        if gather_output:
            check_rank_order("ColumnParallelLinear: gather_output", layout)
        self.layout, self.collectives = layout, collectives
        self.param_layouts = {"weight": ParamLayout(layout), "bias": ParamLayout(layout)}
        _set_parameters(
            self, in_features, layout.length, bias, initialise, device=device, dtype=dtype
        )
        self.multiply = _linear
        if collectives.size == 1:
            self.run = _linear
            return
        self._enter = gather_tokens if sequence_parallel else enter
        self._gathers_tokens = sequence_parallel
        self.run = type(self)._split_and_gather if gather_output else type(self)._split

    @property
    def is_local(self) -> bool:
        """Whether a product without gradients communicates nothing."""
        if self.collectives.size == 1:
            return True
        return not self._gathers_tokens and self.run is not type(self)._split_and_gather

    def replace_weight(self, product: WeightProduct) -> None:
        """See `replaced_weight.WeightProduct`: `product` computes in place of the weight. Local."""
        self.multiply = _replaced_linear(self, product)
        if self.collectives.size == 1:
            self.run = self.multiply

    def _split(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self.multiply(self, self._enter(x, self.collectives))
        return self.multiply(self, self.collectives.all_gather(x) if self._gathers_tokens else x)

    def _split_and_gather(self, x: Tensor) -> Tensor:
        y = self._split(x)
        if torch.is_grad_enabled():
            return gather_replicated(y, self.layout, self.collectives)
        return self.collectives.all_gather(y, dim=-1, sizes=self.layout.sizes)


class RowParallelLinear(ReplaceableLinear, FastModule):
    """`y = x W^T + b` where each rank holds some of the inputs, and the results are summed.

    On one rank this is `F.linear` and nothing else. Otherwise collective: an all-reduce, or a
    reduce-scatter of tokens under sequence parallelism. The bias is added once, after the sum.
    Where no gradient is recorded the all-reduce is in place, without an `autograd.Function`; and
    where ranks read each other's memory, as with `pcomm.nvls.nvls_collectives`, the product is
    written where they read it, and not copied there. Not a `WeightProduct`, nor under autocast.

    Layers that decode are built without sequence parallelism: a step has any number of tokens, and
    the weights are the same.

    Args:
        layout: Layout of the I inputs, which is that of the outputs of the layer before.
        out_features: O, the number of outputs.
        collectives: Collectives of the tensor-parallel group, without gradients.
        bias: True adds a bias, whole on every rank.
        sequence_parallel: True if the output is this rank's shard of the tokens.
        initialise: False allocates this rank's parameters alone and leaves them as the memory was,
            for weights that are loaded; otherwise the whole weight is allocated first.
        device: Device of the parameters.
        dtype: Data type of the parameters.

    Shape: `[T, i]` to `[T, O]`, or `[T / size, O]` under sequence parallelism. Weight `[O, i]`.

    Raises:
        LayoutError: The layout is over another number of ranks, or no partition; when called, a
            number of tokens that is no multiple of the ranks under sequence parallelism.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    multiply: Callable[[Any, Tensor], Tensor]

    def __init__(
        self,
        layout: Layout,
        out_features: int,
        collectives: Collectives,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        initialise: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_partition("RowParallelLinear", layout, collectives)
        self.layout, self.collectives = layout, collectives
        self.param_layouts = {
            "weight": ParamLayout(layout, dim=1),
            "bias": ParamLayout(has_partial_gradient=sequence_parallel and collectives.size > 1),
        }
        _set_parameters(
            self, layout.length, out_features, bias, initialise, device=device, dtype=dtype
        )
        self.multiply = _product
        if collectives.size == 1:
            self.run = _linear
            return
        self._leave = scatter_tokens if sequence_parallel else leave
        self._scatters_tokens = sequence_parallel
        self.run = type(self)._split

    def replace_weight(self, product: WeightProduct) -> None:
        """See `replaced_weight.WeightProduct`: `product` computes in place of the weight. Local."""
        if self.collectives.size == 1:
            self.run = _replaced_linear(self, product)
        else:
            self.multiply = _replaced_product(self, product)

    def _split(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            y = self._leave(self.multiply(self, x), self.collectives)
        elif (room := self._room_for_product(x)) is not None:
            torch.mm(x.flatten(0, -2), self.weight.t(), out=room.flatten(0, -2))
            y = add_up(
                room, self.collectives, scatters_tokens=self._scatters_tokens, in_place=False
            )
        else:
            y = self.multiply(self, x)
            y = add_up(y, self.collectives, scatters_tokens=self._scatters_tokens)
        # Under autocast y is narrower than the bias, and F.linear does not widen it either.
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _room_for_product(self, x: Tensor) -> Tensor | None:
        """Where the collectives read the product from, if it is torch's and can be put there."""
        if self.multiply is not _product or x.dim() < 2 or not x.is_contiguous():
            return None
        weight = self.weight
        # Under autocast torch converts inputs, but not where the result has a place.
        if x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
            return None
        shape = (*x.shape[:-1], weight.shape[0])
        return room_for_sum(shape, x, self.collectives, scatters_tokens=self._scatters_tokens)


def _set_parameters(
    module: ColumnParallelLinear | RowParallelLinear,
    in_features: int,
    out_features: int,
    bias: bool,
    initialise: bool,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    rank = module.collectives.rank
    if initialise:
        whole = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        take_parameters(module, whole, rank)
        return
    shapes: dict[str, tuple[int, ...]] = {"weight": (out_features, in_features)}
    if bias:
        shapes["bias"] = (out_features,)
    else:
        module.register_parameter("bias", None)
    empty_parameters(module, shapes, rank, device=device, dtype=dtype)


def _linear(module: ColumnParallelLinear | RowParallelLinear, x: Tensor) -> Tensor:
    own = module.__dict__["_parameters"]
    try:
        return F.linear(x, own["weight"], own["bias"])
    except KeyError:
        # A parametrization (weight norm, for example) has put something else in its place.
        return F.linear(x, module.weight, module.bias)


def _product(module: RowParallelLinear, x: Tensor) -> Tensor:
    return F.linear(x, module.weight)


class WeightProduct(Protocol):
    """What computes `x W^T + b` for a weight that a layer does not hold itself.

    `layer.replace_weight(product)` is for inference: no gradient passes through. The parameter
    `weight` becomes one on the `meta` device, of the same shape and dtype and without memory, so
    that what asks for these goes on; functions of torch that need its numbers are refused, and
    `state_dict` and `load_state_dict` of the layer.
    """

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads of the weight."""
        ...

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[..., O]` of `x` `[..., I]`, in its dtype."""
        ...


def _replaced_linear(layer: nn.Module, product: WeightProduct) -> Callable[[Any, Tensor], Tensor]:
    """A function of layer and input that computes with `product` and the layer's bias. Local."""
    forget_weight(layer, product)
    return partial(_with_bias, product)


def _replaced_product(layer: nn.Module, product: WeightProduct) -> Callable[[Any, Tensor], Tensor]:
    """The same without the bias, for a layer that adds it after a sum over ranks. Local."""
    forget_weight(layer, product)
    return partial(_without_bias, product)


class _WeightWithoutMemory(nn.Parameter):
    """What stands for a weight that was replaced: a shape and a dtype, and no numbers.

    Torch computes with a tensor on the `meta` device beside one on a CPU, and gives what lies in
    its memory. So every function of torch but those of shape, dtype and memory is refused.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch calls in the place of `func`."""
        name = func.__name__
        if name not in _WITHOUT_NUMBERS:
            raise UnsupportedError(
                f"{name.strip('_')} of the weight of a linear layer",
                found="a weight that was replaced by its packed or quantised form",
                why="Its numbers are gone, and the layer would go on with the form that it has.",
                fix="Change the weight, or compute with it, before it is replaced, or leave this "
                "layer as it is.",
            )
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs or {})
        return found.as_subclass(cls) if type(found) is Tensor and found.is_meta else found

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Shape, dtype and whether it requires a gradient; torch's way goes on from its `data`."""
        return _stand_in_of, (tuple(self.shape), self.dtype, self.requires_grad)


def _stand_in_of(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> _WeightWithoutMemory:
    return _WeightWithoutMemory(torch.empty(shape, dtype=dtype, device="meta"), requires_grad)


# Names of functions of torch for which a tensor need not have numbers. Attributes are among them:
# what `data` or `T` give is again a weight without memory.
_WITHOUT_NUMBERS = (
    *("__get__", "__set__", "__repr__", "__format__", "__hash__", "__len__", "__reduce_ex__"),
    *("clone", "detach", "detach_", "requires_grad_", "size", "dim", "numel", "nelement", "stride"),
    *("ndimension", "element_size", "storage_offset", "is_contiguous", "is_floating_point"),
    *("is_complex", "is_shared", "share_memory_", "is_inference", "data_ptr", "get_device"),
    *("empty_like", "new_empty", "untyped_storage", "_is_view", "is_conj", "is_neg"),
)


def forget_weight(layer: nn.Module, product: WeightProduct) -> None:
    """Put a parameter without memory in the place of `weight`, and refuse `state_dict`. Local.

    Args:
        layer: Module with a parameter `weight`, and a `bias` that may be None.
        product: The product that computes in its place, from then on the layer's attribute
            `weight_product`.
    """
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if not weight.is_meta:
        layer.register_state_dict_pre_hook(_refuse_save)
        layer.register_load_state_dict_pre_hook(_refuse_load)
    if isinstance(layer.bias, nn.Parameter):
        # Nothing of the layer is trained from here on.
        layer.bias.requires_grad_(False)
    layer.__dict__.setdefault("_sample_of_weight", weight.detach().new_empty(0))
    stand_in = _WeightWithoutMemory(torch.empty_like(weight, device="meta"), requires_grad=False)
    layer._parameters["weight"] = layer.__dict__["_stand_in"] = stand_in
    layer.weight_product = product  # type: ignore[assignment]


def check_no_gradient(layer: nn.Module, x: Tensor) -> None:
    """Refuse a call in which a gradient or another weight would be lost. Local.

    Args:
        layer: Layer whose weight was replaced.
        x: Its input.

    Raises:
        UnsupportedError: Gradients are recorded, and the input or a parameter requires one. Or the
            parameter `weight` is another one by now, as within `torch.func.functional_call` and
            behind a parametrization.
    """
    # A graph that is traced has the layer's product in it, and no weight to look at.
    if not torch.compiler.is_compiling():
        own = layer.__dict__
        weight = own["_parameters"].get("weight")
        if weight is None or weight is not own["_stand_in"]:
            raise _other_weight()
    if not torch.is_grad_enabled():
        return
    names = [name for name, one in layer.named_parameters() if one.requires_grad]
    if x.requires_grad or names:
        what = f"an input {list(x.shape)}" if x.requires_grad else f"a parameter {names[0]!r}"
        raise UnsupportedError(
            "a gradient through a linear layer whose weight was replaced",
            found=f"{what} that requires a gradient",
            why="The packed or quantised form of a weight has no backward.",
            fix="Train the model before its weights are replaced, or load it again; for "
            "inference call it under torch.inference_mode().",
        )


def _with_bias(product: WeightProduct, layer: Any, x: Tensor) -> Tensor:
    check_no_gradient(layer, x)
    return product(x, layer.__dict__["_parameters"]["bias"])


def _without_bias(product: WeightProduct, layer: Any, x: Tensor) -> Tensor:
    check_no_gradient(layer, x)
    return product(x, None)


def _refuse_save(_layer: nn.Module, prefix: str, _keep_vars: bool) -> None:
    raise _no_state("state_dict", prefix)


def _refuse_load(_layer: nn.Module, _state: Any, prefix: str, *_others: Any) -> None:
    raise _no_state("load_state_dict", prefix)


def _other_weight() -> UnsupportedError:
    return UnsupportedError(
        "another parameter `weight` for a linear layer",
        found="a layer whose weight was replaced by its packed or quantised form",
        why="The layer would go on with the old values.",
        fix="Resize, tie, set or parametrise weights before they are replaced, or put a new layer "
        "in the place of this one.",
    )


def _no_state(asked: str, prefix: str) -> UnsupportedError:
    return UnsupportedError(
        f"{asked}: {prefix}weight of a linear layer",
        found="a weight that was replaced by its packed or quantised form",
        why="That form is made for one processor, and the values that it was made from are gone.",
        fix="Save or load the state before the weights are replaced, or take it from the "
        "directory that the model was loaded from.",
    )
