"""Checks of what the cores are given: on the host, from shapes and integers alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcomm.core.errors import ConfigError, LayoutError

__all__ = ["check_group", "check_shape", "check_tokens"]


def check_tokens(asked: str, cu_seqlens: Sequence[int], **tensors: Tensor) -> None:
    """Every tensor has one row for each token of the pack.

    Raises:
        LayoutError: A tensor is longer or shorter than the last offset.
    """
    for name, x in tensors.items():
        if len(x) != cu_seqlens[-1]:
            raise LayoutError(
                f"{asked}: {name}",
                found=f"{len(x)} tokens, and cu_seqlens ends at {cu_seqlens[-1]}",
                why="A token outside all sequences has no state to meet.",
                fix="Cut the tensor at the last offset, or give the rest an offset of its own.",
            )


def check_shape(asked: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """`x` has the shape that the other arguments ask for.

    Raises:
        ConfigError: Another shape.
    """
    if tuple(x.shape) != shape:
        raise ConfigError(
            asked,
            found=f"shape {tuple(x.shape)}",
            why=f"By the other arguments it has {shape}.",
            fix="See the docstring for what each dimension is.",
        )


def check_group(asked: str, num_heads: int, num_groups: int) -> None:
    """Every key head, or group, serves the same number of value heads.

    Raises:
        ConfigError: Value heads that are no multiple of the key heads.
    """
    if num_groups < 1 or num_heads % num_groups:
        raise ConfigError(
            asked,
            found=f"{num_heads} value heads and {num_groups} key heads",
            why="Each key head serves the same number of consecutive value heads.",
            fix="Make the number of value heads a multiple of the number of key heads.",
        )
