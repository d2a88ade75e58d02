"""Tokens of a corpus, built beside those that a run has, and exchanged for them at once."""

from __future__ import annotations

import json
import logging
import shutil
import time
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
from pcomm.integration.data.manifest import Manifest, checksums_of, hash_of
from pcomm.integration.data.split import cut_text, held_out_mask
from pcomm.integration.data.token_cache import write_tokens
from pcomm.integration.data.tokenizer import BytePairTokenizer, train_tokenizer
from pcomm.integration.data.waiting import every

__all__ = ["Built", "build"]

_log = logging.getLogger("pcomm.train")

# Characters that are encoded at once: enough for all cores, little enough for any memory.
_CHUNK_CHARACTERS = 1 << 20
_SAY_S = 5.0
# Files that an error lists.
_LISTED = 20
_BUILDING, _REPLACED = "data.building", "data.replaced"


@dataclass(frozen=True)
class Built:
    """Tokens that lie beside those of the run, and take their place when `take_place` is called.

    Args:
        run_dir: The run's folder.
        has_tokenizer: True if a tokenizer was trained, which then comes with them.
    """

    run_dir: Path
    has_tokenizer: bool

    def take_place(self) -> None:
        """Exchange the tokens, and the tokenizer. Local; on one rank.

        A process that dies within leaves tokens that no manifest vouches for, never a mixture.
        """
        data, replaced = self.run_dir / "data", self.run_dir / _REPLACED
        if self.has_tokenizer:
            (data / "manifest.json").unlink(missing_ok=True)
            (self._folder / "tokenizer.json").replace(self.run_dir / "tokenizer.json")
        if data.exists():
            data.rename(replaced)
        self._folder.rename(data)
        # Who has mapped the old tokens keeps them.
        shutil.rmtree(replaced, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was built. Local."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _folder(self) -> Path:
        return self.run_dir / _BUILDING


def build(
    files: Sequence[SourceFile],
    data: DataConfig,
    sources: str,
    run_dir: Path,
    kept: BytePairTokenizer | None,
) -> Built:
    """Tokenise a corpus into a folder of its own in `run_dir`, which is made if absent. Local.

    Args:
        files: The corpus.
        data: Split of the text, and number of token ids.
        sources: Hash of all that the tokens are made from.
        run_dir: The run's folder, whose tokens stay as they are.
        kept: The tokenizer to use; None to train one.

    Raises:
        ConfigError: The files or the split cannot be used.
    """
    keys, num_empty = _survey(files)
    split = _Split(held_out_mask(keys, data.held_out), data.held_out)
    tokenizer = kept
    if tokenizer is None:
        # Fails here, not within the trainer, where there is nothing to train on.
        train_texts = (text for text, is_held_out in split.texts(files) if not is_held_out)
        tokenizer = train_tokenizer(train_texts, data.vocabulary)
    built = Built(run_dir, has_tokenizer=kept is None)
    for left in (_BUILDING, _REPLACED):
        shutil.rmtree(run_dir / left, ignore_errors=True)
    try:
        _write(files, split, tokenizer, data, sources, num_empty, built)
    except BaseException:
        built.discard()
        raise
    return built


def _write(
    files: Sequence[SourceFile],
    split: _Split,
    tokenizer: BytePairTokenizer,
    data: DataConfig,
    sources: str,
    num_empty: int,
    built: Built,
) -> None:
    folder = built.run_dir / _BUILDING
    folder.mkdir(parents=True)
    if built.has_tokenizer:
        tokenizer.save(folder / "tokenizer.json")
    saved = (folder if built.has_tokenizer else built.run_dir) / "tokenizer.json"
    done = 0
    tick = every(_SAY_S, time.monotonic, lambda s: _log.info("encoded %d documents", done))
    with (
        write_tokens(folder, "train", data.vocabulary) as train,
        write_tokens(folder, "held_out", data.vocabulary) as evaluation,
    ):
        for chunk in _chunks(split.texts(files)):
            tick()
            encoded = tokenizer.encode_all([text for text, _ in chunk])
            for (_, is_held_out), ids in zip(chunk, encoded, strict=True):
                (evaluation if is_held_out else train).append([*ids, tokenizer.end_id])
            done += len(chunk)
    manifest = Manifest(
        sources=sources,
        tokenizer=hash_of(saved.read_bytes()),
        vocabulary=data.vocabulary,
        num_empty=num_empty,
        train_documents=len(train.offsets) - 1,
        train_tokens=train.offsets[-1],
        held_out_documents=len(evaluation.offsets) - 1,
        held_out_tokens=evaluation.offsets[-1],
        checksums=checksums_of(folder),
    )
    with atomic_write(folder / "manifest.json") as file:
        file.write(json.dumps(asdict(manifest), indent=2).encode() + b"\n")


@dataclass(frozen=True)
class _Split:
    """Which texts are held out: whole documents, or the end of the only one.

    Args:
        held_out: One bool for each document with text, True if it is held out.
        share: Share of the text that is held out, in [0, 1).
    """

    held_out: NDArray[np.bool_]
    share: float

    def texts(self, files: Sequence[SourceFile]) -> Iterator[tuple[str, bool]]:
        """The texts in order, and whether each is held out."""
        documents = self._documents(files)
        if len(self.held_out) > 1 or not self.share:
            yield from documents
            return
        # As a list, so that a file that has grown is noticed before it is cut.
        [(text, _)] = list(documents)
        parts = cut_text(text, self.share)
        if parts is None:
            raise ConfigError(
                "data.held_out",
                found=f"one document, {text.strip()!r}, and the share {self.share}",
                why="Nothing would be left to learn, or to evaluate with.",
                fix="Give more text, or set data.held_out = 0 to train without an evaluation.",
            )
        yield parts[0], False
        yield parts[1], True

    def _documents(self, files: Sequence[SourceFile]) -> Iterator[tuple[str, bool]]:
        texts = (doc.text for file in files for doc in file.documents() if doc.text.strip())
        for text, is_held_out in zip_longest(texts, self.held_out.tolist()):
            if text is None or is_held_out is None:
                raise ConfigError(
                    "data.path",
                    found=f"another number of documents than the {len(self.held_out)} counted "
                    "just before",
                    why="A file changed while it was read, so some documents may be torn.",
                    fix="Start the run again when nothing writes to the files any more.",
                )
            yield text, is_held_out


def _survey(files: Sequence[SourceFile]) -> tuple[list[str], int]:
    """The keys of the documents with text, and the number of those without."""
    keys: list[str] = []
    num_empty = 0
    errors: list[ConfigError] = []
    for file in files:
        try:
            for document in file.documents():
                if document.text.strip():
                    keys.append(document.key)
                else:
                    num_empty += 1
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else _all_of(errors, len(files))
    if not keys:
        raise ConfigError(
            "data.path",
            found=f"{num_empty} documents in {len(files)} files, and no text in any of them",
            why="There is nothing to learn from.",
            fix="Name files with text in them.",
        )
    return keys, num_empty


def _all_of(errors: Sequence[ConfigError], num_files: int) -> ConfigError:
    """One error for all files that cannot be read, of which it lists the first."""
    shown = errors[:_LISTED]
    lines = [f"{error.asked.removeprefix('data.path: ')}: {error.found}" for error in shown]
    if len(errors) > len(shown):
        lines.append(f"and {len(errors) - len(shown)} more")
    return ConfigError(
        "data.path",
        found="\n".join([f"{len(errors)} of {num_files} files that cannot be read", *lines]),
        why="\n".join(dict.fromkeys(error.why for error in shown)),
        fix="\n".join(dict.fromkeys(error.fix for error in shown)),
    )


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
