"""The ways to quantise the weights of a model while it is loaded, by the name of an option."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from pcomm.core.errors import ConfigError, UnsupportedError, near_misses
from pcomm.inference.layers import quantize_int8

__all__ = ["QUANTIZATIONS", "Quantizer", "quantizer"]

QUANTIZATIONS = ("int8",)
"""Names that `--quantization` takes."""

Quantizer = Callable[[nn.Module, str | None], object]
"""Quantises one layer of a model, by its name, if it is linear; or all of them, for None."""


def quantizer(name: str | None, device: torch.device | str) -> Quantizer | None:
    """The function that quantises as `name` says; None for None. Local.

    Args:
        name: One of `QUANTIZATIONS`, or None.
        device: Device of the model.

    Raises:
        ConfigError: There is no such quantization.
        UnsupportedError: There is none on this device.
    """
    if name is None:
        return None
    if name not in QUANTIZATIONS:
        raise ConfigError(
            "LLM: quantization",
            found=f"{name!r}",
            why="Weights are kept in the dtype of the model, or in one of these: "
            + ", ".join(QUANTIZATIONS)
            + ".",
            fix=near_misses(str(name), QUANTIZATIONS),
        )
    if torch.device(device).type != "cpu":
        raise UnsupportedError(
            f"LLM: quantization {name}",
            found=f"device {device}",
            why="The products with int8 weights are made by a kernel of torch for CPUs.",
            fix="Leave --quantization out, or give --device cpu.",
        )
    return _int8


def _int8(model: nn.Module, name: str | None) -> None:
    quantize_int8(model, only=None if name is None else (name,))
