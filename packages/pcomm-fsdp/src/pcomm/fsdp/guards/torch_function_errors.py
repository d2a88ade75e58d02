"""Errors for functions of torch that would take this rank's shards for the whole model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from pcomm.core.errors import ConfigError, UnsupportedError

__all__ = [
    "copied",
    "copied_model",
    "cut_matrices",
    "gradient_without_groups",
    "mixed_elements",
    "pickled",
    "scattered_matrices",
    "sharded_twice",
    "state_dict_of_shards",
    "unsharded_state",
    "viewed",
]


def copied_model() -> ConfigError:
    """A sharded model was copied."""
    return ConfigError(
        "copy.deepcopy of a sharded model",
        found="entry points and hooks that belong to the model it is a copy of",
        why="The copy would compute with the parameters of the original.",
        fix="Copy the model before fully_shard, or keep copies of sharded.parameters().",
    )


def copied(what: str) -> ConfigError:
    """A module or a parameter was copied."""
    return ConfigError(
        f"copy.deepcopy of {what}",
        found="this rank's shard of flat buffers, which belong to the model it is a copy of",
        why="The copy would be no part of a model, nor a whole one.",
        fix="Copy the model before fully_shard, or keep shard.detach().clone() for each of "
        "sharded.parameters(): averages of shards are shards of the average.",
    )


def pickled(what: str) -> ConfigError:
    """A module or a parameter was pickled."""
    return ConfigError(
        f"pickle or torch.save of {what}",
        found="this rank's shards of the parameters; the rest is on other ranks",
        why="One rank's file would pass for the whole model.",
        fix="Save sharded.full_state_dict(), which all ranks call; or save_checkpoint.",
    )


def viewed(name: str) -> ConfigError:
    """A parameter was viewed as a vector."""
    return ConfigError(
        f"view of parameter {name!r}, as in nn.utils.parameters_to_vector",
        found="this rank's shard of it; the rest is on other ranks",
        why="The vector would be that of one rank's shards.",
        fix="Take sharded.full_state_dict(), on all ranks; or shard.detach().view() of the shard.",
    )


def sharded_twice() -> ConfigError:
    """DistributedDataParallel was asked to wrap the model."""
    return ConfigError(
        "DistributedDataParallel of a sharded model",
        found="parameters of which each rank holds another shard",
        why="It would send rank 0's shards to all ranks, and reduce gradients a second time.",
        fix="Call the sharded model itself; for replicas of shards pass Roles(replicate=...).",
    )


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


def gradient_without_groups() -> UnsupportedError:
    """A gradient has outlived its model."""
    return UnsupportedError(
        "a gradient of a sharded model that is gone",
        found="no groups any more",
        why="The other shards are on other ranks.",
        fix="Keep the model as long as its gradients, or take full_gradients() before.",
    )


def state_dict_of_shards(asked: str, fix: str) -> ConfigError:
    """A state dict was taken or loaded outside of `Sharded.as_shards`."""
    return ConfigError(
        asked,
        found="this rank's shards of the parameters; the rest is on other ranks",
        why="One rank's file would pass for the whole model, and a shard for a parameter.",
        fix=fix,
    )


def unsharded_state(
    optimizer: Optimizer, key: str, name: str, shape: Sequence[int], shard: Tensor
) -> ConfigError:
    """An optimizer has state of an unsharded model."""
    return ConfigError(
        f"step of {type(optimizer).__name__}",
        found=f"{key} of {name!r} is that of the whole parameter: {shape}",
        why=f"This rank has a shard of it, of shape {tuple(shard.shape)}.",
        fix="Call load_checkpoint with optimizer_shard_views(sharded, optimizer).",
    )


def scattered_matrices(optimizer: Optimizer, kind: str) -> UnsupportedError:
    """An optimizer for whole matrices has parameters that are entire on other ranks."""
    return UnsupportedError(
        f"step of {type(optimizer).__name__}",
        found="parameters that are entire on another rank, and have no elements here",
        why=f"{kind} takes means of all elements of a matrix.",
        fix="Give it [p for p in sharded.parameters() if p.numel()].",
    )


def cut_matrices(optimizer: Optimizer, kind: str, names: Sequence[str]) -> UnsupportedError:
    """An optimizer for whole matrices has parameters that are cut."""
    return UnsupportedError(
        f"step of {type(optimizer).__name__}",
        found=f"shards of parameters on each rank: {', '.join(names[:4])}",
        why=f"{kind} looks at several elements at once, or at their number, and would see "
        "those of this rank.",
        fix="Use an elementwise optimizer (SGD, Adam, AdamW, ...), or put the parameters "
        "into a scope whose groups have one rank, where they are entire.",
    )
