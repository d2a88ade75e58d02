"""The dtype, device and form of loaded weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from pcomm.core.errors import ConfigError, UnsupportedError, near_misses
from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pcomm.inference.layers import pack_weights, quantize_int8
from pcomm.integration.models.language_model import LanguageModel

__all__ = ["DTYPES", "WeightForm", "device_of", "dtype_of", "weight_form"]


QUANTIZATIONS = ("int8",)
"""Names that `--quantization` takes."""

_LAYERS = (ColumnParallelLinear, RowParallelLinear)


@dataclass(frozen=True)
class WeightForm:
    """A form that takes the place of weights, layer by layer while they are read.

    Attributes:
        replace: Function of a model and the names of layers, or None for all of them.
        is_for_all: True if every linear layer gets it, however small.
    """

    replace: Callable[[nn.Module, Collection[str] | None], object]
    is_for_all: bool

    def filled(self, model: LanguageModel) -> Callable[[str], object]:
        """A function of the name of a parameter that has been read. Local.

        The layers of a form for all are read into memory that they share, so that only one of them
        is there as it was stored.

        Raises:
            UnsupportedError: The form does not exist for the dtype of the model.
        """
        if self.is_for_all:
            _check_dtype(model.norm.weight.dtype)
            _share_memory(model)

        def filled(name: str) -> None:
            place = name.rpartition(".")[0]
            if isinstance(model.get_submodule(place), _LAYERS):
                self.replace(model, (place,))

        return filled


def weight_form(
    quantization: str | None,
    device: torch.device | str,
    *,
    batch_invariant: bool = False,
    ranks: int = 1,
    most_rows: int | None = None,
) -> WeightForm | None:
    """The form for a model on a device; None where weights stay as they are. Local.

    Args:
        quantization: One of `QUANTIZATIONS`; None for packed weights on a CPU.
        device: Device of the model.
        batch_invariant: True for weights whose products give a row the same bits among any others.
        ranks: Number of ranks that share the model.
        most_rows: Tokens of a step that only decodes, at most; None if they are not known.

    Raises:
        ConfigError: There is no such quantization.
        UnsupportedError: There is none on this device, or no batch-invariant form.
    """
    is_cpu = torch.device(device).type == "cpu"
    if batch_invariant:
        _check_batch_invariant(quantization, device, ranks)
        return WeightForm(_invariant, is_for_all=False)
    if quantization is None:
        packed = partial(_packed, most_rows=most_rows)
        return WeightForm(packed, is_for_all=False) if is_cpu else None
    if quantization not in QUANTIZATIONS:
        raise ConfigError(
            "LLM: quantization",
            found=f"{quantization!r}",
            why="Weights are kept in the dtype of the model, or in one of these: "
            + ", ".join(QUANTIZATIONS)
            + ".",
            fix=near_misses(str(quantization), QUANTIZATIONS),
        )
    if not is_cpu:
        raise UnsupportedError(
            f"LLM: quantization {quantization}",
            found=f"device {device}",
            why="The products with int8 weights are made by a kernel of torch for CPUs.",
            fix="Leave --quantization out, or give --device cpu.",
        )
    return WeightForm(_int8, is_for_all=True)


def _packed(
    model: nn.Module, names: Collection[str] | None, *, most_rows: int | None = None
) -> None:
    pack_weights(model, only=names, most_rows=most_rows)


def _invariant(model: nn.Module, names: Collection[str] | None) -> None:
    pack_weights(model, only=names, batch_invariant=True)


def _check_batch_invariant(
    quantization: str | None, device: torch.device | str, ranks: int
) -> None:
    if quantization is not None:
        found = f"quantization={quantization!r}"
        why = "Up to 16 rows are multiplied by another kernel for int8 than more of them."
    elif torch.device(device).type != "cpu":
        found = f"device={str(device)!r}"
        why = "The order of the sums of a product is known for CPUs alone."
    elif ranks > 2:
        found = f"{ranks} ranks"
        why = "The order in which gloo adds up three ranks or more depends on the number of rows."
    else:
        return
    raise UnsupportedError(
        "LLM: batch_invariant=True",
        found=found,
        why=why,
        fix="Load the model in bf16 or fp32 on a CPU, on one rank or two, or leave batch_invariant "
        "out.",
    )


def _int8(model: nn.Module, names: Collection[str] | None) -> None:
    if names is None:
        # Those that are left, of which there may be none.
        names = [name for name, one in model.named_modules() if isinstance(one, _LAYERS)]
    quantize_int8(model, only=names)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype == torch.float16:
        raise UnsupportedError(
            "LLM: quantization int8 with dtype float16",
            found="a model in fp16",
            why="Scales have the dtype of the activations, and those of small rows vanish in fp16.",
            fix="Load the model in bf16: --dtype bfloat16, or dtype='bfloat16' in Python.",
        )


def _share_memory(model: LanguageModel) -> None:
    layers = [module for module in model.modules() if isinstance(module, _LAYERS)]
    # A head that is tied has the embedding's weight, which stays.
    weights = [layer.weight for layer in layers if layer.weight is not model.embedding.weight]
    shared = model.norm.weight.new_empty(max(weight.numel() for weight in weights))
    for weight in weights:
        weight.data = shared[: weight.numel()].view(weight.shape)


DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""Dtypes by the name that options have for them; `auto` is that of the files."""


def dtype_of(name: str | torch.dtype) -> torch.dtype | None:
    """The dtype of a name; None for `auto`. Local.

    Raises:
        ConfigError: It is the name of no dtype that weights have.
    """
    if isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise ConfigError(
            "LLM: dtype",
            found=f"{name!r}",
            why="Weights are floating-point numbers of one of these: " + ", ".join(DTYPES) + ".",
            fix=near_misses(name, DTYPES),
        )
    return DTYPES[name]


def device_of(device: str | torch.device) -> torch.device:
    """A device that this machine has. Local.

    Args:
        device: `cpu`, `cuda` or `cuda:0`; a `torch.device` is returned as it is.

    Raises:
        ConfigError: The name means nothing, or there is no such device.
    """
    if isinstance(device, torch.device):
        return device
    found = f"{device!r}"
    place: torch.device | None = None
    with contextlib.suppress(RuntimeError):
        place = torch.device(device)
    if place is not None and place.type == "cpu":
        return place
    if place is not None and place.type == "cuda":
        count = torch.cuda.device_count()
        if (place.index or 0) < count:
            return place
        found += f", and {count} CUDA devices"
    raise ConfigError(
        "device",
        found=found,
        why="A model is on the CPU, or on a CUDA device of this machine.",
        fix="Give cpu, or cuda or cuda:N where there are such devices.",
    )
