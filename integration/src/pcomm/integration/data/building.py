"""Documents to token ids on disk: split, tokenise, write, and say what was read in a manifest."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pcomm.core.errors import ConfigError
from pcomm.integration.config.sections import DataConfig
from pcomm.integration.data.sources import SourceFile
from pcomm.integration.data.token_cache import write_tokens
from pcomm.integration.data.tokenizer import BytePairTokenizer, every, train_tokenizer
from pcomm.integration.files import atomic_write, new_hash

__all__ = [
    "BuiltTokens",
    "build",
    "check_files",
    "cut_text",
    "hash_of",
    "held_out_mask",
    "read_manifest",
    "unusable",
]

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
) -> BuiltTokens:
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
    built = BuiltTokens(run_dir, has_tokenizer=kept is None)
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
    built: BuiltTokens,
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
    return new_hash(content).hexdigest()


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
            digest = hashlib.file_digest(file, new_hash)
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
