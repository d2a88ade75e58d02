"""Which numbers of ranks can share a model: each has as many heads, columns and rows."""

from __future__ import annotations

from pathlib import Path

from pcomm.core.errors import ConfigError
from pcomm.integration.config_resolved import ResolvedModel, ResolvedParallel
from pcomm.integration.config_rules import check_shards

__all__ = ["check_ranks"]


def check_ranks(path: Path, shape: ResolvedModel, vocabulary: int, ranks: int) -> None:
    """Refuse ranks that cannot share a model, and say which can. Local; nothing is read.

    Args:
        path: Folder of the model, for the message.
        shape: Shape of the model.
        vocabulary: Number of token ids.
        ranks: Number of ranks, at least 1.

    Raises:
        ConfigError: Heads, key and value heads, the width of the MLP or the vocabulary is no
            multiple of `ranks`.
    """
    cause = _unshared(shape, vocabulary, ranks)
    if cause is None:
        return
    # The rows of the embedding are shared too, so no other number can do.
    divisors = [number for number in range(1, vocabulary + 1) if vocabulary % number == 0]
    fitting = [number for number in divisors if _unshared(shape, vocabulary, number) is None]
    raise ConfigError(
        f"model {path}: --ranks {ranks}",
        found=cause.found.replace("parallel.tp", "the number of ranks"),
        why=cause.why.replace("Each rank of tp", "Each rank"),
        fix=f"Give --ranks one of {', '.join(map(str, fitting))}.",
    )


def _unshared(shape: ResolvedModel, vocabulary: int, ranks: int) -> ConfigError | None:
    """The reason why so many ranks cannot share the layers; None if they can."""
    try:
        check_shards(shape, vocabulary, ResolvedParallel(tp=ranks, dp=1, shard_ranks=1))
    except ConfigError as error:
        return error
    return None
