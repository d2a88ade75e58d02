"""What tokens on disk were made from, how many there are, and whether they are as written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from pcomm.core.errors import ConfigError
from pcomm.integration.files import atomic_write, new_hash

__all__ = [
    "MANIFEST",
    "Manifest",
    "SourceCount",
    "check_files",
    "checksums_of",
    "hash_of",
    "read_manifest",
    "unusable",
    "write_manifest",
]

MANIFEST = "manifest.json"


class SourceCount(NamedTuple):
    """How much of one source of a mixture is learnt."""

    documents: int
    """Number of documents, which follow each other in the tokens."""

    tokens: int
    """Number of tokens of those documents."""


@dataclass(frozen=True)
class Manifest:
    """Hashes of what the tokens follow from, and how many there are.

    Args:
        sources: Hash of the text, and of how it is read and split.
        tokenizer: Hash of `tokenizer.json`.
        vocabulary: Bound of the token ids.
        num_empty: Number of documents without text.
        train_documents: Number of documents to learn.
        train_tokens: Number of tokens of those documents.
        held_out_documents: Number of documents that are held out.
        held_out_tokens: Number of tokens of those documents.
        checksums: Hash of each file of tokens, by its name.
        parts: Documents and tokens to learn from each entry of `data.path`, where these have
            weights.
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
    parts: Sequence[SourceCount] = ()


def hash_of(content: bytes) -> str:
    """BLAKE2b of 16 bytes, in hexadecimal digits."""
    return new_hash(content).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the tokens in a folder.

    Raises:
        ConfigError: There is none, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["checksums"] = dict(content["checksums"])
        content["parts"] = tuple(SourceCount(**one) for one in content["parts"])
        return Manifest(**content)
    except OSError as error:
        raise unusable(folder, f"{path.name}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise unusable(folder, f"{path.name}: {error!r}") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into the folder of its tokens, whole or not at all.

    Raises:
        OSError: The folder cannot be written.
    """
    content = {**asdict(manifest), "parts": [part._asdict() for part in manifest.parts]}
    with atomic_write(folder / MANIFEST) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")


def checksums_of(folder: Path) -> dict[str, str]:
    """Hashes of the arrays in a folder, by the names of their files."""
    found = {}
    for path in sorted(folder.glob("*.npy")):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, new_hash)
        found[path.name] = digest.hexdigest()
    return found


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare the files of tokens with their checksums. Local; reads all of them.

    Raises:
        ConfigError: A file is not as it was written.
    """
    try:
        found = checksums_of(folder)
    except OSError as error:
        raise unusable(folder, str(error)) from error
    if found != manifest.checksums:
        names = [name for name, digest in found.items() if manifest.checksums.get(name) != digest]
        raise unusable(folder, f"{', '.join(names) or 'a missing file'}: another checksum")


def unusable(folder: Path, found: str) -> ConfigError:
    """The error that tokens are missing, damaged, or not finished."""
    return ConfigError(
        f"prepared data in {folder}",
        found=found,
        why="The tokens there are missing, damaged, or not finished.",
        fix="Start the run again: its first rank prepares the data anew.",
    )
