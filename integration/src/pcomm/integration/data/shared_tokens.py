"""Tokens that runs on the same text share, in a folder that may be deleted at any time."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
import uuid
from pathlib import Path

from pcomm.core import environment
from pcomm.core.errors import ConfigError
from pcomm.integration.data.manifest import (
    MANIFEST,
    check_files,
    hash_of,
    read_manifest,
    unusable,
)
from pcomm.integration.huggingface.tokenizer import TOKENIZER

__all__ = ["SharedTokens", "cache_folder"]

_log = logging.getLogger("pcomm.train")

# What a run that died has left half done is removed when it is so old.
_LEFT_S = 24 * 3600.0


def cache_folder(setting: str) -> Path | None:
    """The folder that `data.cache` and `PCOMM_CACHE` mean, which need not exist; None for none.

    Args:
        setting: Value of `data.cache`.
    """
    chosen = environment.cache() if setting == "auto" else setting
    if chosen == "none":
        return None
    if chosen != "auto":
        return Path(chosen).expanduser() / "tokens"
    # The specification of the variable has relative paths ignored.
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path("~/.cache").expanduser()
    # No home at all: the sign stays.
    return base / "pcomm" / "tokens" if base.is_absolute() else None


class SharedTokens:
    """Entries of tokens, each a folder whose name says what they are made from.

    An entry is never changed: it appears whole, by a rename, and of two runs that write it at once
    the second finds it there. Arrays are linked where the file system can, so that they take no
    space twice, and copied elsewhere; so a run does not need its entry any more.

    Args:
        folder: The folder, which need not exist; None to share nothing.
        is_read_only: True to take entries, and to change nothing in the folder.
    """

    def __init__(self, folder: Path | None, *, is_read_only: bool = False) -> None:
        self._folder, self._is_read_only = folder, is_read_only

    def take(self, key: str, sources: str, target: Path, *, has_tokenizer: bool) -> bool:
        """Put the files of an entry into a new folder, and compare them with their checksums.

        An entry that cannot be used is removed where that is allowed, with a message.

        Args:
            key: Hash of all that the tokens are made from.
            sources: `Manifest.sources` of tokens that this version makes.
            target: The folder to make. It is not there if there is no such entry.
            has_tokenizer: True if the tokenizer was trained on the text, and belongs to the entry.

        Returns:
            Whether there was one.
        """
        entry = None if self._folder is None else self._folder / key
        if entry is None:
            return False
        try:
            if not entry.is_dir():
                return False
            _place(entry, target)
            _check(target, sources, has_tokenizer)
        except (OSError, ConfigError) as error:
            shutil.rmtree(target, ignore_errors=True)
            _log.warning("%s cannot be used (%s); the tokens are made anew", entry, _what(error))
            # Else it is not the entry that is at fault, but for example a disk that is full.
            if isinstance(error, ConfigError | FileNotFoundError | IsADirectoryError):
                self._remove(entry)
            return False
        _log.info("took the tokens of this text from %s, where an earlier run kept them", entry)
        return True

    def keep(self, key: str, folder: Path) -> None:
        """Make an entry of the tokens in a folder, for other runs; if that fails, say so.

        Args:
            key: Hash of all that they are made from.
            folder: Tokens with their manifest, and with the tokenizer if it was trained on them.
        """
        if self._folder is None or self._is_read_only:
            return
        partial = self._folder / f".{key}.{uuid.uuid4().hex}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_left()
            _place(folder, partial)
            size = sum(path.stat().st_size for path in partial.iterdir())
            partial.rename(self._folder / key)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            # Another run was first, with the same tokens.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not self._folder.is_dir():
                _log.warning(
                    "no tokens are kept in %s for other runs: %s; this run goes on without. "
                    "data.cache names another folder, or none",
                    self._folder,
                    _what(error),
                )
            return
        _log.info(
            "the tokens are kept for other runs on this text: %s, %.1f MB; delete the folder "
            'whenever you like, and data.cache = "none" keeps nothing',
            self._folder / key,
            size / 1e6,
        )

    def _remove(self, entry: Path) -> None:
        """Take an entry away under another name, so that no run finds half of it."""
        if self._is_read_only:
            return
        away = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}")
        try:
            entry.rename(away)
        except OSError:
            return
        shutil.rmtree(away, ignore_errors=True)

    def _remove_left(self) -> None:
        assert self._folder is not None
        for left in self._folder.glob(".*"):
            try:
                is_old = time.time() - left.stat().st_mtime > _LEFT_S
            except OSError:
                continue
            if is_old:
                shutil.rmtree(left, ignore_errors=True)


def _place(source: Path, target: Path) -> None:
    """Link or copy the tokens of a folder into a new one."""
    target.mkdir(parents=True)
    for path in source.glob("*.npy"):
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copyfile(path, target / path.name)
    for name in (TOKENIZER, MANIFEST):
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def _check(folder: Path, sources: str, has_tokenizer: bool) -> None:
    manifest = read_manifest(folder)
    if manifest.sources != sources:
        raise unusable(folder, "tokens of another version of pcomm")
    check_files(folder, manifest)
    if has_tokenizer and hash_of((folder / TOKENIZER).read_bytes()) != manifest.tokenizer:
        raise unusable(folder, f"{TOKENIZER}: another checksum")


def _what(error: OSError | ConfigError) -> str:
    return error.found if isinstance(error, ConfigError) else error.strerror or str(error)
