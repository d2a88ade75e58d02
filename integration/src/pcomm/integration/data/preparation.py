"""From files to mapped tokens: prepared once by one rank, opened by all of them.

Beside the run lie `tokenizer.json` and `data/`: the tokens of both splits, and `manifest.json`,
which says what they were made from. New tokens are built beside these and exchanged for them, so a
call that fails or is interrupted changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pcomm.core.errors import ConfigError
from pcomm.integration.config.sections import DataConfig
from pcomm.integration.data.building import (
    BuiltTokens,
    build,
    check_files,
    hash_of,
    read_manifest,
    unusable,
)
from pcomm.integration.data.sources import content_hash, find_files
from pcomm.integration.data.token_cache import TokenCorpus, open_tokens
from pcomm.integration.data.tokenizer import BytePairTokenizer, load_tokenizer
from pcomm.integration.huggingface.model_from import has_directory

__all__ = ["Prepared", "build_beside", "open_prepared", "prepare"]

_log = logging.getLogger("pcomm.train")

# Part of the fingerprint: raise it when the same files would give other tokens.
_FORMAT = 2


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


def prepare(data: DataConfig, run_dir: Path, *, keep_tokenizer: bool = False) -> Prepared:
    """Tokenise the corpus into `run_dir`, or open what is there if it is still the same.

    One rank calls it, then all others call `open_prepared`. What depends on a changed file, key
    or tokenizer is built again. Arguments and errors are those of `build_beside`.
    """
    built = build_beside(data, run_dir, keep_tokenizer=keep_tokenizer)
    if built is not None:
        built.take_place()
    return open_prepared(run_dir)


def build_beside(
    data: DataConfig,
    run_dir: Path,
    *,
    keep_tokenizer: bool = False,
    check: Callable[[str], None] | None = None,
) -> BuiltTokens | None:
    """The first half of `prepare`, after which `run_dir` still has the tokens that it had. Local.

    Args:
        data: Files of the text, and how it is split. `data.vocabulary` bounds the token ids.
        run_dir: The run's folder; made if absent.
        keep_tokenizer: Use the `tokenizer.json` that is there, whatever it was trained on. For
            a resumed run, whose weights mean nothing under another one.
        check: Function that, with a kept tokenizer, is given the fingerprint before any text is
            encoded, and raises if that is of no use.

    Returns:
        What was built; None if the tokens that are there are the same, and undamaged by their
        checksums.

    Raises:
        ConfigError: The files, the split or the kept tokenizer cannot be used; see `find_files`,
            `build` and `load_tokenizer`.
        UnsupportedError: A parquet file is asked for, and pyarrow is not installed.
    """
    files = find_files(data)
    # How text is read, split and tokenised is as much a source of the tokens as the text.
    settings = f"{_FORMAT} {data.text_key} {data.held_out!r} {data.vocabulary}"
    sources = hash_of(f"{settings} {content_hash(files)}".encode())
    kept = load_tokenizer(run_dir / "tokenizer.json") if keep_tokenizer else None
    if kept is not None:
        _check_fits(kept, data.vocabulary, run_dir)
        if check is not None:
            check(_fingerprint(sources, hash_of((run_dir / "tokenizer.json").read_bytes())))
    # Tokens of a tokenizer that came with a model are of no use to a run that begins without one.
    is_own = keep_tokenizer or not has_directory(run_dir)
    try:
        if is_own and (manifest := read_manifest(run_dir)).sources == sources:
            check_files(run_dir, manifest)
            open_prepared(run_dir)
            return None
    except ConfigError as error:
        # Not there, damaged or interrupted: whichever it was, it is built again.
        if (run_dir / "data").exists():
            _log.warning("%s: %s; the tokens are made anew", error.asked, error.found)
    return build(files, data, sources, run_dir, kept)


def open_prepared(run_dir: Path) -> Prepared:
    """What `prepare` left in `run_dir`, mapped into memory.

    Raises:
        ConfigError: Nothing was prepared there, or it is damaged.
    """
    manifest = read_manifest(run_dir)
    tokenizer_file = run_dir / "tokenizer.json"
    tokenizer = load_tokenizer(tokenizer_file)
    if hash_of(tokenizer_file.read_bytes()) != manifest.tokenizer:
        raise unusable(run_dir, "tokenizer.json is not the one that made the tokens")
    bytes_per_id = tokenizer.bytes_per_id(manifest.vocabulary)
    folder = run_dir / "data"
    try:
        train, held_out = (
            open_tokens(folder, split, bytes_per_id, tokenizer.end_id)
            for split in ("train", "held_out")
        )
    except (OSError, ValueError) as error:
        raise unusable(run_dir, str(error)) from error
    counts = train.num_documents, train.num_tokens, held_out.num_documents, held_out.num_tokens
    promised = (
        manifest.train_documents,
        manifest.train_tokens,
        manifest.held_out_documents,
        manifest.held_out_tokens,
    )
    if counts != promised:
        raise unusable(run_dir, f"documents and tokens number {counts}, not {promised}")
    fingerprint = _fingerprint(manifest.sources, manifest.tokenizer)
    return Prepared(tokenizer, train, held_out, fingerprint, manifest.num_empty)


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
