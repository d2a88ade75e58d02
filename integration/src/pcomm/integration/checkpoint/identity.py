"""Which run a checkpoint belongs to, so that it is not loaded into another."""

from __future__ import annotations

from typing import Any

from pcomm.core.errors import ConfigError
from pcomm.integration.checkpoint.folders import Checkpoint
from pcomm.integration.config import Config
from pcomm.integration.config_file import to_dict

__all__ = ["check_same_run", "identity_of"]

# What decides the weights and the batches. The rest (length of the run, learning rate, parallel
# sizes, precision, evaluation, checkpoints) may change between one start and the next.
_TRAIN = ("seed", "sequence_length", "global_batch_tokens")


def identity_of(config: Config, corpus: str) -> dict[str, Any]:
    """What must not change when a run is resumed; goes into every checkpoint.

    Args:
        config: Validated, so that derived sizes are compared and not the zeros they came from.
        corpus: Fingerprint of the tokenised text.
    """
    sections = to_dict(config)
    return {
        "model": sections["model"],
        "data": {"vocabulary": config.data.vocabulary, "fingerprint": corpus},
        "train": {name: sections["train"][name] for name in _TRAIN},
    }


def check_same_run(checkpoint: Checkpoint, identity: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint of another model or other batches. Local.

    Raises:
        ConfigError: Names every key that differs, with both values.
    """
    saved = checkpoint.state().get("identity", {})
    differences = [
        f"{section}.{name} was {saved.get(section, {}).get(name)!r} and is {value!r}"
        for section, values in identity.items()
        for name, value in values.items()
        if _plain(saved.get(section, {}).get(name)) != _plain(value)
    ]
    if differences:
        raise ConfigError(
            f"checkpoint {checkpoint.folder}",
            found="; ".join(differences),
            why="These decide the weights and the batches, so the run would not be the same one.",
            fix="Go back to the run's configuration, choose another --out, or start over "
            "with --restart.",
        )


def _plain(value: object) -> object:
    """JSON has lists where Python has tuples."""
    return list(value) if isinstance(value, tuple) else value
