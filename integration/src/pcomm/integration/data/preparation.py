"""From files to mapped tokens: prepared once by one rank, opened by all of them.

Beside the run lie `tokenizer.json` and `data/`: the tokens of both splits, and `manifest.json`,
which says what they were made from. New tokens are built beside these, or taken from those that
runs share, and exchanged for them, so a call that fails or is interrupted changes nothing.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import tokenizers

from pcomm.core.errors import ConfigError
from pcomm.integration.config.sections import DataConfig
from pcomm.integration.data.building import BuiltTokens, build
from pcomm.integration.data.manifest import check_files, hash_of, read_manifest, unusable
from pcomm.integration.data.readers import SourceFile
from pcomm.integration.data.shared_tokens import SharedTokens, cache_folder
from pcomm.integration.data.sources import content_hash, file_times, find_sources
from pcomm.integration.data.token_cache import TokenCorpus, open_tokens
from pcomm.integration.data.tokenizer import BytePairTokenizer, every, load_tokenizer
from pcomm.integration.files import atomic_write
from pcomm.integration.huggingface.model_from import has_directory
from pcomm.integration.huggingface.tokenizer import TOKENIZER

__all__ = ["Prepared", "build_beside", "open_prepared", "prepare"]

_log = logging.getLogger("pcomm.train")

# Part of the fingerprint: raise it when the same files would give other tokens.
_FORMAT = 3

# Beside the tokens: when the files were changed, so that a run that goes on reads none of them.
_TIMES = "read.json"

_SAY_S = 5.0


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


def prepare(
    data: DataConfig, run_dir: Path, *, keep_tokenizer: bool = False, shares: bool = True
) -> Prepared:
    """Tokenise the corpus into `run_dir`, or open what is there if it is still the same.

    One rank calls it, then all others call `open_prepared`. What depends on a changed file, key
    or tokenizer is built again. Arguments and errors are those of `build_beside`.
    """
    built = build_beside(data, run_dir, keep_tokenizer=keep_tokenizer, shares=shares)
    if built is not None:
        built.take_place()
    return open_prepared(run_dir)


def build_beside(
    data: DataConfig,
    run_dir: Path,
    *,
    keep_tokenizer: bool = False,
    check: Callable[[str], None] | None = None,
    shares: bool = True,
) -> BuiltTokens | None:
    """The first half of `prepare`, after which `run_dir` still has the tokens that it had. Local.

    Args:
        data: Files of the text, how it is split, and where tokens are shared with other runs.
            `data.vocabulary` bounds the token ids.
        run_dir: The run's folder; made if absent.
        keep_tokenizer: Use the `tokenizer.json` that is there, whatever it was trained on. For
            a resumed run, whose weights mean nothing under another one.
        check: Function that, with a kept tokenizer, is given the fingerprint before any text is
            encoded, and raises if that is of no use.
        shares: False takes tokens that another run has kept, and keeps none for others.

    Returns:
        What was built; None if the tokens that are there are the same, and undamaged by their
        checksums.

    Raises:
        ConfigError: The files, the split or the kept tokenizer cannot be used; see `find_files`,
            `build` and `load_tokenizer`.
        UnsupportedError: A parquet file is asked for, and pyarrow is not installed.
    """
    sources = find_sources(data)
    files = list(chain.from_iterable(sources))
    times, is_settled = file_times(files)
    content = _content_before(run_dir, times) or content_hash(_told(files))
    # How text is read, split and tokenised is as much a source of the tokens as the text.
    reading = (data.text_key, data.encoding, data.errors, data.held_out, data.vocabulary)
    counts = [len(source) for source in sources] if data.weights else []
    text = hash_of(f"{reading!r} {counts} {content}".encode())
    made_from = hash_of(f"{_FORMAT} {text}".encode())
    kept = load_tokenizer(run_dir / TOKENIZER) if keep_tokenizer else None
    # What another version would train on the same text is another tokenizer.
    tokenizer = f"trained by {tokenizers.__version__}"
    if kept is not None:
        _check_fits(kept, data.vocabulary, run_dir)
        tokenizer = hash_of((run_dir / TOKENIZER).read_bytes())
        if check is not None:
            check(_fingerprint(made_from, tokenizer))
    # Files that have just changed may change again without another time.
    noted = times if is_settled else ""
    if _is_there(run_dir, made_from, is_own=keep_tokenizer or not has_directory(run_dir)):
        _note_times(run_dir / "data", noted, content)
        return None
    built = BuiltTokens(run_dir, has_tokenizer=kept is None)
    built.begin()
    shared = SharedTokens(cache_folder(data.cache), is_read_only=not shares)
    key = hash_of(f"{text} {tokenizer}".encode())
    if not shared.take(key, made_from, built.folder, has_tokenizer=built.has_tokenizer):
        if not shares:
            _log.info("no run has kept the tokens of this text: they are made now, and not kept")
        build(sources, data, made_from, built, kept)
        if file_times(files)[0] == times:
            shared.keep(key, built.folder)
        else:
            _log.warning("a file of the corpus changed while it was read: other runs read it anew")
    _note_times(built.folder, noted, content)
    return built


def open_prepared(run_dir: Path) -> Prepared:
    """What `prepare` left in `run_dir`, mapped into memory.

    Raises:
        ConfigError: Nothing was prepared there, or it is damaged.
    """
    folder = run_dir / "data"
    manifest = read_manifest(folder)
    tokenizer_file = run_dir / TOKENIZER
    tokenizer = load_tokenizer(tokenizer_file)
    if hash_of(tokenizer_file.read_bytes()) != manifest.tokenizer:
        raise unusable(folder, "tokenizer.json is not the one that made the tokens")
    bytes_per_id = tokenizer.bytes_per_id(manifest.vocabulary)
    documents = tuple(part.documents for part in manifest.parts)
    try:
        train = open_tokens(folder, "train", bytes_per_id, tokenizer.end_id, documents)
        held_out = open_tokens(folder, "held_out", bytes_per_id, tokenizer.end_id)
    except (OSError, ValueError) as error:
        raise unusable(folder, str(error)) from error
    counts = train.num_documents, train.num_tokens, held_out.num_documents, held_out.num_tokens
    promised = (
        manifest.train_documents,
        manifest.train_tokens,
        manifest.held_out_documents,
        manifest.held_out_tokens,
    )
    if counts != promised or [s.num_tokens for s in train.sources()] != (
        [part.tokens for part in manifest.parts] or [manifest.train_tokens]
    ):
        raise unusable(folder, f"documents and tokens number {counts}, not {promised}")
    fingerprint = _fingerprint(manifest.sources, manifest.tokenizer)
    return Prepared(tokenizer, train, held_out, fingerprint, manifest.num_empty)


def _is_there(run_dir: Path, made_from: str, *, is_own: bool) -> bool:
    """Whether the run has these tokens, whole.

    Args:
        run_dir: The run's folder.
        made_from: Hash of all that they are made from.
        is_own: False for tokens of a tokenizer that came with a model, which are of no use to a run
            that begins without one.
    """
    folder = run_dir / "data"
    try:
        if is_own and (manifest := read_manifest(folder)).sources == made_from:
            check_files(folder, manifest)
            open_prepared(run_dir)
            return True
    except ConfigError as error:
        # Not there, damaged or interrupted: whichever it was, it is built again.
        if folder.exists():
            _log.warning("%s: %s; the tokens are made anew", error.asked, error.found)
    return False


def _content_before(run_dir: Path, times: str) -> str:
    """The hash of the corpus when the run last read it, if no file has changed since."""
    try:
        noted = json.loads((run_dir / "data" / _TIMES).read_text(encoding="utf-8"))
        return str(noted["content"]) if times and noted["times"] == times else ""
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def _note_times(folder: Path, times: str, content: str) -> None:
    noted = json.dumps({"times": times, "content": content}).encode()
    path = folder / _TIMES
    if not (path.exists() and path.read_bytes() == noted):
        with atomic_write(path) as file:
            file.write(noted)


def _told(files: Sequence[SourceFile]) -> Iterator[SourceFile]:
    """The files, of which it says every few seconds how many were hashed."""
    done = 0
    tick = every(
        _SAY_S, time.monotonic, lambda s: _log.info("hashed %d of %d files", done, len(files))
    )
    for file in files:
        yield file
        done += 1
        tick()


def _check_fits(tokenizer: BytePairTokenizer, vocabulary: int, run_dir: Path) -> None:
    if tokenizer.num_ids > vocabulary:
        raise ConfigError(
            "data.vocabulary",
            found=f"{vocabulary}, and a tokenizer with {tokenizer.num_ids} ids in {run_dir}",
            why="The run continues with its own tokenizer, and the model would have no row for "
            "its last ids.",
            fix="Keep the vocabulary of the run, or train anew in an empty folder.",
        )


def _fingerprint(sources: str, tokenizer: str) -> str:
    return hash_of(f"{sources} {tokenizer}".encode())
