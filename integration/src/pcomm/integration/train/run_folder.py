"""A run's folder: whether this run may go on in it, and what it holds before the first step."""

from __future__ import annotations

import logging
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from pcomm.core.errors import ConfigError
from pcomm.core.process import World
from pcomm.integration.atomic_file import atomic_write
from pcomm.integration.checkpoint.folders import checkpoints, discard, newest, remove_partial
from pcomm.integration.checkpoint.identity import check_same_run, identity_of
from pcomm.integration.checkpoint.reader import check_index
from pcomm.integration.config import Config
from pcomm.integration.config_file import to_toml
from pcomm.integration.data.preparation import build_beside
from pcomm.integration.huggingface.directory import CONFIG
from pcomm.integration.huggingface.run_files import forget_directory, placed_files
from pcomm.integration.train.run_lock import holder_of, lock_run

__all__ = [
    "check_resumable",
    "check_shared",
    "hold_folder",
    "prepare_folder",
    "tell_holder",
    "write_config",
]

_log = logging.getLogger("pcomm.train")


def check_resumable(config: Config, run_dir: Path, corpus: str | None = None) -> None:
    """Refuse a folder, or a checkpoint in it, that this run cannot go on from. Local.

    Args:
        config: Validated.
        run_dir: The run's folder, which need not exist.
        corpus: Fingerprint of the tokenised text; None to check the rest before there is one.

    Raises:
        ConfigError: The folder is a Hugging Face directory; or the newest checkpoint is damaged, of
            another model or other batches, or of a longer run.
    """
    if (run_dir / CONFIG).is_file():
        raise ConfigError(
            f"train: folder {run_dir}",
            found=f"{CONFIG} of a Hugging Face directory",
            why="With checkpoints of a run beside it nothing would say which weights are meant.",
            fix="Give --out a folder of its own, and start from the weights here with "
            "`pcomm convert` or model.from.",
        )
    checkpoint = newest(run_dir)
    if checkpoint is None:
        return
    check_same_run(checkpoint, identity_of(config, corpus))
    check_index(checkpoint)
    if checkpoint.step > config.train.steps:
        raise ConfigError(
            f"train.steps = {config.train.steps}",
            found=f"a checkpoint after step {checkpoint.step} in {run_dir}",
            why="The run is already longer than it should become.",
            fix=f"Set train.steps to at least {checkpoint.step}, or start over with --restart.",
        )


_HOLDER = "pcomm/holder of the run's folder"


def tell_holder(run_dir: Path, world: World) -> None:
    """Tell the other ranks who holds the folder. On the rank that does."""
    if world.store is not None:
        world.store.set(_HOLDER, holder_of(run_dir))


def check_shared(run_dir: Path, world: World) -> None:
    """Refuse a folder that is not the one which the first rank holds. Local, after `tell_holder`.

    Raises:
        ConfigError: Another folder has that name on this host.
    """
    if world.rank and world.store is not None:
        holder, here = world.store.get(_HOLDER).decode(), holder_of(run_dir)
        if here != holder:
            raise ConfigError(
                f"train: folder {run_dir}",
                found=f"rank {world.rank} on {socket.gethostname()} does not see there what rank 0 "
                f"has written: {holder}",
                why="All ranks read tokens and write checkpoints in one folder.",
                fix="Give --out a folder on a file system that all hosts share, such as NFS or "
                "Lustre, by a path that is the same on all of them.",
            )


@contextmanager
def hold_folder(run_dir: Path) -> Iterator[None]:
    """Make the folder and keep other runs out of it; see `lock_run`. On one rank.

    Raises:
        ConfigError: Another run is under way there, or the folder cannot be written.
    """
    with ExitStack() as held:
        try:
            held.enter_context(lock_run(run_dir))
        except OSError as error:
            raise _unwritable(run_dir, error) from error
        yield


def prepare_folder(config: Config, run_dir: Path, *, must_restart: bool) -> None:
    """Make an orderly folder with tokenised text in it. On one rank.

    A run that is refused changes nothing there: what a checkpoint demands is compared first, new
    tokens are built beside the old, and only then anything is replaced or removed.

    Args:
        config: Validated; its `data` says which text.
        run_dir: Made if absent.
        must_restart: Remove the checkpoints and metrics that are there.

    Raises:
        PcommError: The folder cannot be written, the text not be used, or the text is not the one
            that the newest checkpoint has learnt; see `build_beside`.
    """
    # The weights of a run that goes on mean nothing under another tokenizer.
    kept = None if must_restart else newest(run_dir)

    def check(fingerprint: str) -> None:
        assert kept is not None, "only a kept tokenizer tells the fingerprint before"
        check_same_run(kept, identity_of(config, fingerprint))

    is_placed = kept is None and bool(config.model.from_)
    placed = placed_files(Path(config.model.from_), run_dir) if is_placed else nullcontext()
    try:
        with placed:
            built = build_beside(
                config.data,
                run_dir,
                keep_tokenizer=is_placed or kept is not None,
                check=None if kept is None else check,
            )
        run_dir.mkdir(parents=True, exist_ok=True)
        for folder in remove_partial(run_dir):
            _log.warning("removed %s, which a run that died left half done", folder)
        if must_restart:
            _remove_results(run_dir)
        if not config.model.from_:
            forget_directory(run_dir)
        if built is not None:
            built.take_place()
    except OSError as error:
        raise _unwritable(run_dir, error) from error


def write_config(config: Config, run_dir: Path) -> None:
    """Write `config.toml`, whole or not at all. On one rank.

    Args:
        config: The configuration as the user wrote it: with `parallel.dp = "auto"` it fits other
            numbers of ranks, too.
        run_dir: Exists.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        with atomic_write(run_dir / "config.toml") as file:
            file.write(to_toml(config).encode())
    except OSError as error:
        raise _unwritable(run_dir, error) from error


def _remove_results(run_dir: Path) -> None:
    """Remove what training wrote; the tokenised text stays, which other seeds would share."""
    for checkpoint in checkpoints(run_dir):
        discard(checkpoint.folder)
    shutil.rmtree(run_dir / "tensorboard", ignore_errors=True)
    for file in (run_dir / "metrics.jsonl", run_dir / "loss.png"):
        file.unlink(missing_ok=True)


def _unwritable(run_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"train: folder {run_dir}",
        found=str(error),
        why="The run's tokens, checkpoints and metrics are written there.",
        fix="Choose a folder that can be written, with --out.",
    )
