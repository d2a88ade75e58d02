"""From files to mapped tokens: prepared once by one rank, opened by all of them.

Beside the run lie `tokenizer.json` and `data/`: the tokens of both splits, and `manifest.json`,
which says what they were made from. The manifest is removed before anything else is replaced and
written last, so what stands under a manifest is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pcomm.core.errors import ConfigError
from pcomm.integration.atomic_file import atomic_write
from pcomm.integration.config import DataConfig
from pcomm.integration.data.documents import SourceFile
from pcomm.integration.data.sources import content_hash, find_files
from pcomm.integration.data.split import held_out_mask
from pcomm.integration.data.token_cache import TokenCorpus, open_tokens, write_tokens
from pcomm.integration.data.tokenizer import (
    BytePairTokenizer,
    load_tokenizer,
    train_tokenizer,
)

__all__ = ["Prepared", "open_prepared", "prepare"]

# Part of the fingerprint: raise it when the same files would give other tokens.
_FORMAT = 1
# Characters that are encoded at once: enough for all cores, little enough for any memory.
_CHUNK_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Prepared:
    """A corpus, ready to be cut into batches."""

    tokenizer: BytePairTokenizer
    train: TokenCorpus
    held_out: TokenCorpus
    """Has no documents where `data.held_out` is 0."""

    fingerprint: str
    """Changes when the files, the split or the tokenizer change: store it with a checkpoint."""

    num_empty: int
    """Documents that were skipped because they hold no text, or white space only."""


@dataclass(frozen=True)
class _Manifest:
    sources: str
    tokenizer: str
    vocabulary: int
    num_empty: int
    train_documents: int
    train_tokens: int
    held_out_documents: int
    held_out_tokens: int


def prepare(data: DataConfig, run_dir: Path, *, keep_tokenizer: bool = False) -> Prepared:
    """Tokenise the corpus into `run_dir`, or open what is there if it is still the same.

    One rank calls it, then all others call `open_prepared`. What depends on a changed file, key
    or tokenizer is built again; an interrupted call leaves nothing that would be taken for whole.

    Args:
        data: Where the text is and how it is split. `data.vocabulary` bounds the token ids.
        run_dir: The run's folder; made if absent.
        keep_tokenizer: Use the `tokenizer.json` that is there, whatever it was trained on. For
            a resumed run, whose weights mean nothing under another one.

    Raises:
        ConfigError: The files, the split or the kept tokenizer cannot be used; see `find_files`,
            `held_out_mask` and `load_tokenizer`.
        UnsupportedError: A parquet file is asked for, and pyarrow is not installed.
    """
    files = find_files(data)
    # How text is read, split and tokenised is as much a source of the tokens as the text.
    settings = f"{_FORMAT} {data.text_key} {data.held_out!r} {data.vocabulary}"
    sources = _hash(f"{settings} {content_hash(files)}".encode())
    kept = load_tokenizer(run_dir / "tokenizer.json") if keep_tokenizer else None
    if kept is not None:
        _check_fits(kept, data.vocabulary, run_dir)
    try:
        manifest = _read_manifest(run_dir)
        if manifest.sources == sources:
            return open_prepared(run_dir)
    except ConfigError:
        pass  # Not there, damaged or interrupted: whichever it was, it is built again.
    _build(files, data, sources, run_dir, kept)
    return open_prepared(run_dir)


def open_prepared(run_dir: Path) -> Prepared:
    """What `prepare` left in `run_dir`, mapped into memory.

    Raises:
        ConfigError: Nothing was prepared there, or it is damaged.
    """
    manifest = _read_manifest(run_dir)
    tokenizer_file = run_dir / "tokenizer.json"
    tokenizer = load_tokenizer(tokenizer_file)
    if _hash(tokenizer_file.read_bytes()) != manifest.tokenizer:
        raise _unusable(run_dir, "tokenizer.json is not the one that made the tokens")
    bytes_per_id = tokenizer.bytes_per_id(manifest.vocabulary)
    folder = run_dir / "data"
    try:
        train, held_out = (
            open_tokens(folder, split, bytes_per_id, tokenizer.end_id)
            for split in ("train", "held_out")
        )
    except (OSError, ValueError, EOFError) as error:
        raise _unusable(run_dir, str(error)) from error
    counts = train.num_documents, train.num_tokens, held_out.num_documents, held_out.num_tokens
    promised = (
        manifest.train_documents,
        manifest.train_tokens,
        manifest.held_out_documents,
        manifest.held_out_tokens,
    )
    if counts != promised:
        raise _unusable(run_dir, f"documents and tokens number {counts}, not {promised}")
    fingerprint = _hash(f"{manifest.sources} {manifest.tokenizer}".encode())
    return Prepared(tokenizer, train, held_out, fingerprint, manifest.num_empty)


def _build(
    files: Sequence[SourceFile],
    data: DataConfig,
    sources: str,
    run_dir: Path,
    kept: BytePairTokenizer | None,
) -> None:
    names, num_empty = _survey(files)
    held_out = held_out_mask(names, data.held_out)
    tokenizer = kept
    if tokenizer is None:
        train_texts = (text for text, is_held_out in _texts(files, held_out) if not is_held_out)
        tokenizer = train_tokenizer(train_texts, data.vocabulary)
    folder = run_dir / "data"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").unlink(missing_ok=True)
    if kept is None:
        tokenizer.save(run_dir / "tokenizer.json")
    with (
        write_tokens(folder, "train", data.vocabulary) as train,
        write_tokens(folder, "held_out", data.vocabulary) as evaluation,
    ):
        for chunk in _chunks(_texts(files, held_out)):
            encoded = tokenizer.encode_all([text for text, _ in chunk])
            for (_, is_held_out), ids in zip(chunk, encoded, strict=True):
                (evaluation if is_held_out else train).append([*ids, tokenizer.end_id])
    manifest = _Manifest(
        sources=sources,
        tokenizer=_hash((run_dir / "tokenizer.json").read_bytes()),
        vocabulary=data.vocabulary,
        num_empty=num_empty,
        train_documents=len(train.offsets) - 1,
        train_tokens=train.offsets[-1],
        held_out_documents=len(evaluation.offsets) - 1,
        held_out_tokens=evaluation.offsets[-1],
    )
    with atomic_write(folder / "manifest.json") as file:
        file.write(json.dumps(asdict(manifest), indent=2).encode() + b"\n")


def _survey(files: Sequence[SourceFile]) -> tuple[list[str], int]:
    """The names of the documents with text, and the number of those without."""
    names: list[str] = []
    num_empty = 0
    for file in files:
        for document in file.documents():
            if document.text.strip():
                names.append(document.name)
            else:
                num_empty += 1
    if not names:
        raise ConfigError(
            "data.path",
            found=f"{num_empty} documents in {len(files)} files, and no text in any of them",
            why="There is nothing to learn from.",
            fix="Name files with text in them.",
        )
    return names, num_empty


def _texts(files: Sequence[SourceFile], held_out: NDArray[np.bool_]) -> Iterator[tuple[str, bool]]:
    """The documents with text, and whether each is held out."""
    texts = (doc.text for file in files for doc in file.documents() if doc.text.strip())
    for text, is_held_out in zip_longest(texts, held_out.tolist()):
        if text is None or is_held_out is None:
            raise ConfigError(
                "data.path",
                found=f"another number of documents than the {len(held_out)} counted just before",
                why="A file changed while it was read, so some documents may be torn.",
                fix="Start the run again when nothing writes to the files any more.",
            )
        yield text, is_held_out


def _chunks(texts: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    chunk: list[tuple[str, bool]] = []
    size = 0
    for text, is_held_out in texts:
        chunk.append((text, is_held_out))
        size += len(text)
        if size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _check_fits(tokenizer: BytePairTokenizer, vocabulary: int, run_dir: Path) -> None:
    if tokenizer.num_ids > vocabulary:
        raise ConfigError(
            "data.vocabulary",
            found=f"{vocabulary}, and a tokenizer with {tokenizer.num_ids} ids in {run_dir}",
            why="The run continues with its own tokenizer, and the model would have no row for "
            "its last ids.",
            fix="Keep the vocabulary of the run, or train anew in an empty folder.",
        )


def _read_manifest(run_dir: Path) -> _Manifest:
    path = run_dir / "data" / "manifest.json"
    try:
        return _Manifest(**json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise _unusable(run_dir, f"{path.name}: {error.strerror or error}") from error
    except (ValueError, TypeError) as error:
        raise _unusable(run_dir, f"{path.name}: {error}") from error


def _unusable(run_dir: Path, found: str) -> ConfigError:
    return ConfigError(
        f"prepared data in {run_dir}",
        found=found,
        why="The tokens there are missing, damaged, or not finished.",
        fix="Start the run again: its first rank prepares the data anew.",
    )


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
