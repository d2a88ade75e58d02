"""What the tokens of a run were made from: the file that vouches for them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from pcomm.core.errors import ConfigError

__all__ = ["Manifest", "hash_of", "read_manifest", "unusable"]


@dataclass(frozen=True)
class Manifest:
    """Hashes of what the tokens follow from, and how many there are.

    Args:
        sources: Hash of the text, and of how it is read and split.
        tokenizer: Hash of `tokenizer.json`.
        vocabulary: Bound of the token ids.
        num_empty: Documents without text.
        train_documents: Documents to learn.
        train_tokens: Their tokens.
        held_out_documents: Documents that are held out.
        held_out_tokens: Their tokens.
    """

    sources: str
    tokenizer: str
    vocabulary: int
    num_empty: int
    train_documents: int
    train_tokens: int
    held_out_documents: int
    held_out_tokens: int


def hash_of(content: bytes) -> str:
    """BLAKE2b of 16 bytes, in hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def read_manifest(run_dir: Path) -> Manifest:
    """The manifest of a run's tokens.

    Raises:
        ConfigError: There is none, or it is damaged.
    """
    path = run_dir / "data" / "manifest.json"
    try:
        return Manifest(**json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise unusable(run_dir, f"{path.name}: {error.strerror or error}") from error
    except (ValueError, TypeError) as error:
        raise unusable(run_dir, f"{path.name}: {error}") from error


def unusable(run_dir: Path, found: str) -> ConfigError:
    """The error that tokens are missing, damaged, or not finished."""
    return ConfigError(
        f"prepared data in {run_dir}",
        found=found,
        why="The tokens there are missing, damaged, or not finished.",
        fix="Start the run again: its first rank prepares the data anew.",
    )
