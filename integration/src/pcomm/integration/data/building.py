"""Documents to token ids on disk: split, tokenise, write, and say what was read in a manifest."""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pcomm.core.errors import ConfigError
from pcomm.integration.config.sections import DataConfig
from pcomm.integration.data.manifest import (
    MANIFEST,
    Manifest,
    SourceCount,
    checksums_of,
    hash_of,
    write_manifest,
)
from pcomm.integration.data.readers import SourceFile
from pcomm.integration.data.token_cache import write_tokens
from pcomm.integration.data.tokenizer import BytePairTokenizer, every, train_tokenizer
from pcomm.integration.huggingface.tokenizer import TOKENIZER

__all__ = ["BuiltTokens", "build", "cut_text", "held_out_mask"]

_log = logging.getLogger("pcomm.train")

# Characters that are encoded at once: enough for all cores, little enough for any memory.
_CHUNK_CHARACTERS = 1 << 20

_SAY_S = 5.0

# Files that an error lists.
_LISTED = 20

_BUILDING, _REPLACED = "data.building", "data.replaced"


@dataclass(frozen=True)
class BuiltTokens:
    """Tokens that lie beside those of the run, and take their place when `take_place` is called.

    Args:
        run_dir: The run's folder.
        has_tokenizer: True if a tokenizer was trained, which then comes with them.
    """

    run_dir: Path
    has_tokenizer: bool

    def begin(self) -> None:
        """Remove what a process that died has left. Local; before anything is built."""
        for left in (_BUILDING, _REPLACED):
            shutil.rmtree(self.run_dir / left, ignore_errors=True)

    def take_place(self) -> None:
        """Exchange the tokens, and the tokenizer. Local; on one rank.

        A process that dies within leaves tokens that no manifest vouches for, never a mixture.
        """
        data, replaced = self.run_dir / "data", self.run_dir / _REPLACED
        if self.has_tokenizer:
            (data / MANIFEST).unlink(missing_ok=True)
            (self.folder / TOKENIZER).replace(self.run_dir / TOKENIZER)
        if data.exists():
            data.rename(replaced)
        self.folder.rename(data)
        # Who has mapped the old tokens keeps them.
        shutil.rmtree(replaced, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was built. Local."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def folder(self) -> Path:
        """Where they lie until then."""
        return self.run_dir / _BUILDING


def build(
    sources: Sequence[Sequence[SourceFile]],
    data: DataConfig,
    made_from: str,
    built: BuiltTokens,
    kept: BytePairTokenizer | None,
) -> None:
    """Tokenise a corpus into the folder of `built`, which is made. Local.

    Args:
        sources: The files of each source.
        data: Split of the text, and number of token ids.
        made_from: Hash of all that the tokens are made from.
        built: The tokens to make.
        kept: The tokenizer to use; None to train one.

    Raises:
        ConfigError: The files or the split cannot be used.
    """
    texts = _survey(sources, data)
    tokenizer = kept
    if tokenizer is None:
        # Fails here, not within the trainer, where there is nothing to train on.
        told = _Told("read %s for the tokenizer", texts)
        train_texts = (text for one in texts for text, held in told(one.split()) if not held)
        tokenizer = train_tokenizer(train_texts, data.vocabulary)
    try:
        _write(texts, tokenizer, data, made_from, built)
    except BaseException:
        built.discard()
        raise


def _write(
    texts: Sequence[_SourceText],
    tokenizer: BytePairTokenizer,
    data: DataConfig,
    made_from: str,
    built: BuiltTokens,
) -> None:
    folder = built.folder
    folder.mkdir(parents=True)
    if built.has_tokenizer:
        tokenizer.save(folder / TOKENIZER)
    saved = (folder if built.has_tokenizer else built.run_dir) / TOKENIZER
    told = _Told("encoded %s", texts)
    ends = [SourceCount(0, 0)]
    with (
        write_tokens(folder, "train", data.vocabulary) as train,
        write_tokens(folder, "held_out", data.vocabulary) as evaluation,
    ):
        for source in texts:
            for chunk in _chunks(told(source.split())):
                encoded = tokenizer.encode_all([text for text, _ in chunk])
                for (_, is_held_out), ids in zip(chunk, encoded, strict=True):
                    (evaluation if is_held_out else train).append([*ids, tokenizer.end_id])
            ends.append(SourceCount(len(train.offsets) - 1, train.offsets[-1]))
    parts = [
        SourceCount(end.documents - start.documents, end.tokens - start.tokens)
        for start, end in pairwise(ends)
    ]
    manifest = Manifest(
        sources=made_from,
        tokenizer=hash_of(saved.read_bytes()),
        vocabulary=data.vocabulary,
        num_empty=sum(source.num_empty for source in texts),
        train_documents=len(train.offsets) - 1,
        train_tokens=train.offsets[-1],
        held_out_documents=len(evaluation.offsets) - 1,
        held_out_tokens=evaluation.offsets[-1],
        checksums=checksums_of(folder),
        parts=parts if data.weights else (),
    )
    write_manifest(folder, manifest)


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


class _Told:
    """Hands out texts, and logs every few seconds how many of them have been used.

    Args:
        words: Message, with a place for the numbers.
        texts: Texts of all sources.
    """

    def __init__(self, words: str, texts: Sequence[_SourceText]) -> None:
        self._words = words
        self._all = sum(len(source.held_out) for source in texts)
        self._all_characters = sum(source.num_characters for source in texts)
        self._documents = self._characters = 0
        self._tick = every(_SAY_S, time.monotonic, self._say)

    def __call__(self, texts: Iterator[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
        for text in texts:
            yield text
            self._documents += 1
            self._characters += len(text[0])
            self._tick()

    def _say(self, seconds: float) -> None:
        # The only document of a corpus comes as two.
        done = min(self._documents, self._all)
        _log.info(
            self._words + " (%.1f of %.1f million characters, %.2f million a second)",
            f"{done:,} of {self._all:,} documents",
            self._characters / 1e6,
            self._all_characters / 1e6,
            self._characters / 1e6 / seconds,
        )


def _survey(sources: Sequence[Sequence[SourceFile]], data: DataConfig) -> list[_SourceText]:
    """What there is to read in each source, after one look at all of it."""
    found: list[_SourceText] = []
    errors: list[ConfigError] = []
    num_files = sum(map(len, sources))
    done = num_partly = 0
    tick = every(
        _SAY_S, time.monotonic, lambda s: _log.info("read %d of %d files", done, num_files)
    )
    for number, files in enumerate(sources):
        keys: list[str] = []
        num_empty = num_characters = 0
        for file in files:
            is_whole = True
            try:
                for document in file.documents():
                    tick()
                    is_whole = is_whole and document.is_whole
                    num_characters += len(document.text)
                    if document.text.strip():
                        keys.append(document.key)
                    else:
                        num_empty += 1
            except ConfigError as error:
                errors.append(error)
            done += 1
            num_partly += not is_whole
        if not (keys or errors):
            raise ConfigError(
                f"data.path: {data.path[number]}" if data.weights else "data.path",
                found=f"{num_empty} documents in {len(files)} files, and no text in any of them",
                why="There is nothing to learn from.",
                fix="Name files with text in them.",
            )
        if not errors:
            mask = held_out_mask(keys, data.held_out)
            found.append(_SourceText(files, mask, data.held_out, num_empty, num_characters))
    if errors:
        raise errors[0] if len(errors) == 1 else _all_of(errors, num_files)
    if num_partly:
        _log.warning(
            "%d of %d files hold bytes that are no %s: data.errors = %r has them %s",
            num_partly,
            num_files,
            data.encoding,
            data.errors,
            "replaced" if data.errors == "replace" else "left out",
        )
    return found


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


@dataclass(frozen=True)
class _SourceText:
    """Text of a source, of which whole documents, or the end of the only one, are held out.

    Args:
        files: The files.
        held_out: One bool for each document with text, True if it is held out.
        share: Share of the text that is held out, in [0, 1).
        num_empty: Documents without text.
        num_characters: Characters of all documents.
    """

    files: Sequence[SourceFile]
    held_out: NDArray[np.bool_]
    share: float
    num_empty: int
    num_characters: int

    def split(self) -> Iterator[tuple[str, bool]]:
        """The texts in order, and whether each is held out."""
        documents = self._documents()
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

    def _documents(self) -> Iterator[tuple[str, bool]]:
        texts = (doc.text for file in self.files for doc in file.documents() if doc.text.strip())
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


def held_out_mask(keys: Sequence[str], share: float) -> NDArray[np.bool_]:
    """Whether each document is held out.

    A document's key decides: adding or removing others does not move it to the other side. Where
    the share would leave one side empty, that side gets the document that is nearest to it.

    Args:
        keys: The `Document.key` of all documents, at least two; equal ones are on one side where
            there are others.
        share: Share of the documents to hold out, in [0, 1). 0 holds out none.

    Returns:
        `[len(keys)]`, true where the document is held out.
    """
    places = np.array([_place(key) for key in keys], dtype=np.float64)
    mask = places < share
    if share == 0:
        return mask
    if not mask.any():
        mask[_all_but_every(places == places.min())] = True
    if mask.all():
        mask[_all_but_every(places == places.max())] = False
    return mask


def cut_text(text: str, share: float) -> tuple[str, str] | None:
    """The only document of a corpus as two: the text to learn, and its end, which is held out.

    The cut is at the end of a line where one is near, else of a word, else anywhere.

    Args:
        text: The whole text.
        share: Share of its characters to hold out, in (0, 1).

    Returns:
        Two parts with more than white space in each, which together are the text; None if there
        are no two visible characters.
    """
    # Any cut in this range leaves something visible on both sides.
    first = len(text) - len(text.lstrip()) + 1
    last = len(text.rstrip()) - 1
    if first > last:
        return None
    wanted = min(max(round(len(text) * (1 - share)), first), last)
    # What is held out may become twice as long, so that a line stays whole.
    earliest = max(first, 2 * wanted - len(text))
    for boundary in ("\n", " "):
        found = text.rfind(boundary, earliest - 1, wanted)
        if found >= 0:
            return text[: found + 1], text[found + 1 :]
    return text[:wanted], text[wanted:]


def _all_but_every(chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """`chosen`, or its first alone where that is everything."""
    if not chosen.all():
        return chosen
    first = np.zeros_like(chosen)
    first[0] = True
    return first


def _place(key: str) -> float:
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    # 53 bits, which a float holds exactly.
    return (int.from_bytes(digest, "big") >> 11) / 2**53
