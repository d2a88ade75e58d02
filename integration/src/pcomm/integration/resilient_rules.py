"""Whether a configuration can train on when ranks die: integers only, no torch."""

from __future__ import annotations

from dataclasses import replace

from pcomm.core.errors import UnsupportedError
from pcomm.integration.config import Config
from pcomm.integration.config_resolved import Resolved
from pcomm.integration.config_rules import validate

__all__ = ["validate_resilient"]


def validate_resilient(config: Config, world_size: int) -> Resolved:
    """`validate` of a run that goes on without ranks that die. Local.

    Args:
        config: The configuration as the user wrote it.
        world_size: Number of ranks with which the run starts.

    Raises:
        UnsupportedError: A key has a value that such a run cannot have.
        PcommError: An error of `validate`.
    """
    resolved = validate(replace(config, parallel=replace(config.parallel, failed=())), world_size)
    parallel, train = resolved.parallel, resolved.train
    for key, value, allowed, why in (
        ("parallel.data", parallel.data, "replicate", "A shard is lost with its rank."),
        ("parallel.ep", parallel.ep, 1, "An expert would be lost with its rank."),
        (
            "parallel.failed",
            list(config.parallel.failed),
            [],
            "Ranks that die are found while the run goes on.",
        ),
        (
            "parallel.cp_strategy",
            "heads" if parallel.cp_strategy == "heads" else "auto",
            "auto",
            "Heads need not divide any more among ranks of cp once ranks of tp are gone.",
        ),
        ("train.on_nan", train.on_nan, "stop", "Ranks that join could not know what was skipped."),
        (
            "model.from",
            config.model.from_,
            "",
            "A rank that joins takes its weights from the others or from a checkpoint. First make "
            "the directory the run's first checkpoint, with pcomm convert.",
        ),
    ):
        if value != allowed:
            raise UnsupportedError(
                f"pcomm train --resilient: {key}",
                found=f"the value {value!r}",
                why=why,
                fix=f"Set {key} = {allowed!r}, or train without --resilient.",
            )
    return resolved
