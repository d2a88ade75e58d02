"""What the tokens of a run were made from: the file that vouches for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pcomm.core.errors import ConfigError

__all__ = ["Manifest", "check_files", "checksums_of", "hash_of", "read_manifest", "unusable"]


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
        checksums: Hash of each file of tokens, by its name.
    """

    sources: str
    tokenizer: str
    vocabulary: int
    num_empty: int
    train_documents: int
    train_tokens: int
    held_out_documents: int
    held_out_tokens: int
    checksums: Mapping[str, str]


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
        content = json.loads(path.read_text(encoding="utf-8"))
        return Manifest(**{**content, "checksums": dict(content["checksums"])})
    except OSError as error:
        raise unusable(run_dir, f"{path.name}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise unusable(run_dir, f"{path.name}: {error}") from error


def checksums_of(folder: Path) -> dict[str, str]:
    """Hashes of the arrays in a folder, by the names of their files."""
    found = {}
    for path in sorted(folder.glob("*.npy")):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        found[path.name] = digest.hexdigest()
    return found


def check_files(run_dir: Path, manifest: Manifest) -> None:
    """Compare the files of tokens with their checksums. Local; reads all of them.

    Raises:
        ConfigError: A file is not as it was written.
    """
    try:
        found = checksums_of(run_dir / "data")
    except OSError as error:
        raise unusable(run_dir, str(error)) from error
    if found != manifest.checksums:
        names = [name for name, digest in found.items() if manifest.checksums.get(name) != digest]
        raise unusable(run_dir, f"{', '.join(names) or 'a missing file'}: another checksum")


def unusable(run_dir: Path, found: str) -> ConfigError:
    """The error that tokens are missing, damaged, or not finished."""
    return ConfigError(
        f"prepared data in {run_dir}",
        found=found,
        why="The tokens there are missing, damaged, or not finished.",
        fix="Start the run again: its first rank prepares the data anew.",
    )
