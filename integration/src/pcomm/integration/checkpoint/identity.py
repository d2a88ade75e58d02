"""Which run a checkpoint belongs to, so that it is not loaded into another."""

from __future__ import annotations

from typing import Any

from pcomm.core.errors import ConfigError
from pcomm.integration.checkpoint.folders import Checkpoint
from pcomm.integration.config import Config, keys
from pcomm.integration.config_file import to_dict

__all__ = ["check_same_run", "identity_of"]

# What decides the weights and the batches. The rest (length of the run, learning rate, parallel
# sizes, precision, evaluation, checkpoints) may change between one start and the next.
_TRAIN = ("seed", "sequence_length", "global_batch_tokens")
# What no key of the configuration is called.
_WORDS = {"data.fingerprint": "the text of data.path, or its split (a hash of both)"}


def identity_of(config: Config, corpus: str | None = None) -> dict[str, Any]:
    """What must not change when a run is resumed; goes into every checkpoint.

    Args:
        config: The validated configuration, in which derived sizes are numbers and not `auto`.
        corpus: Fingerprint of the tokenised text; None to compare the rest before there is one.
    """
    sections = to_dict(config)
    data = {"vocabulary": config.data.vocabulary}
    # Where the first weights came from does not matter to those that are saved.
    sections["model"].pop("from")
    return {
        "model": sections["model"],
        "data": data if corpus is None else {**data, "fingerprint": corpus},
        "train": {name: sections["train"][name] for name in _TRAIN},
    }


def check_same_run(checkpoint: Checkpoint, identity: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint of another model or other batches. Local.

    Raises:
        ConfigError: Names every key that differs, with both values.
    """
    saved = _with_newer_keys(_keys(checkpoint.state().get("identity")))
    differences = [
        f"{_WORDS.get(key, key)} was {saved.get(key)!r} and is {value!r}"
        for key, value in _keys(identity).items()
        # What was converted has seen no batch yet, so it says nothing of them.
        if saved.get(key) != value and (checkpoint.step or key in saved)
    ]
    if differences:
        raise ConfigError(
            f"checkpoint {checkpoint.folder}",
            found="; ".join(differences),
            why="These decide the weights and the batches, so the run would not be the same one.",
            fix="Go back to the run's configuration, choose another --out, or start over "
            "with --restart.",
        )


def _with_newer_keys(saved: dict[str, object]) -> dict[str, object]:
    """`saved`, and the defaults of what the model of an earlier version was not told."""
    if "model.pattern" not in saved:
        return saved
    newer = {f"model.{key.name}": key.default for key in keys() if key.section == "model"}
    return {**newer, **saved}


def _keys(identity: object) -> dict[str, object]:
    """`section.key` to value; of a damaged file, what can be made out."""
    sections = identity.items() if isinstance(identity, dict) else ()
    return {
        f"{section}.{name}": value
        for section, values in sections
        if isinstance(values, dict)
        for name, value in values.items()
    }
