"""`pcomm train`: a run from the command line, on one process, on local ranks, or under torchrun."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pcomm.core.errors import ConfigError
from pcomm.core.process import environment, logs

if TYPE_CHECKING:
    from pcomm.integration.config import Config

__all__ = ["TrainCommand", "command"]

_INTERRUPTED = 130


class TrainCommand:
    """Trains a model and shows what it has learnt."""

    name = "train"
    help = "Train a GPT on text files, or on Python's own library; goes on where it stopped."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """`--config`, `--set`, `--ranks`, `--out`, `--restart`, `--trace`."""
        parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file")
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="SECTION.KEY=VALUE",
            help="change one key of the configuration; may be given several times",
        )
        parser.add_argument(
            "--ranks", type=int, default=1, metavar="N", help="start N ranks on this machine"
        )
        parser.add_argument(
            "--out", type=Path, required=True, metavar="DIR", help="the run's folder"
        )
        parser.add_argument(
            "--restart",
            action="store_true",
            help="remove the checkpoints and metrics in DIR and begin anew",
        )
        parser.add_argument(
            "--trace",
            type=Path,
            metavar="FILE",
            help="write what all ranks did in a few steps, for https://ui.perfetto.dev",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Train, then print bits per byte, a sample, and where everything is."""
        # Imported late: other commands do not wait for pydantic.
        from pcomm.integration.config_file import load_config
        from pcomm.integration.config_rules import validate
        from pcomm.integration.huggingface.run_start import start_config

        config = load_config(arguments.config, overrides=arguments.set)
        config = start_config(config, arguments.out, is_new=arguments.restart)
        world_size = _world_size(arguments.ranks)
        validate(config, world_size)
        trace = _trace_file(arguments.trace)
        if arguments.ranks == 1:
            return train_rank(config, arguments.out, arguments.restart, trace)
        # Imported late: until here a mistake is reported without waiting for torch.
        from pcomm.core import run_local
        from pcomm.core.process import RankError

        threads = max(1, (os.cpu_count() or 1) // arguments.ranks)
        try:
            with _terminate_as_interrupt():
                codes = run_local(
                    train_rank,
                    arguments.ranks,
                    (config, arguments.out, arguments.restart, trace),
                    threads=threads,
                )
        except RankError as error:
            print(error, file=sys.stderr)
            return 1
        return int(codes[0])


def train_rank(config: Config, run_dir: Path, must_restart: bool, trace: Path | None) -> int:
    """One rank of `pcomm train`; the first one writes. Returns the exit code."""
    from pcomm.core import connect
    from pcomm.inference import SamplingParams
    from pcomm.integration.generate.writer import Writer
    from pcomm.integration.train.run import run_training

    with connect() as world:
        logs.configure(environment.log_level(), world.rank)
        outcome = run_training(config, run_dir, must_restart=must_restart, trace=trace)
        if world.rank:
            return _INTERRUPTED if outcome.is_interrupted else 0
        if outcome.is_interrupted:
            print(f"stopped after step {outcome.steps}; the same command goes on from there")
            return _INTERRUPTED
        if outcome.bits_per_byte is None:
            print("no held-out documents, so no bits per byte (data.held_out = 0)")
        else:
            print(f"held-out bits per byte: {outcome.bits_per_byte:.3f}")
        sample = config.sample
        if sample.prompt and sample.max_tokens:
            params = SamplingParams(
                max_tokens=sample.max_tokens,
                temperature=sample.temperature,
                seed=config.train.seed,
            )
            text = Writer.load(run_dir).write(sample.prompt, params)
            print(f"\n{text.prompt}{text.text}\n")
        for file, what in (
            ("checkpoints", "weights and optimizer"),
            ("metrics.jsonl", "one row a step"),
            ("loss.png", "the loss as a picture"),
            ("config.toml", "the configuration"),
        ):
            print(f"{run_dir / file}  {what}")
        return 0


def _trace_file(path: Path | None) -> Path | None:
    """Where the trace goes; asked before the run, as it is written in its middle."""
    if path is not None and (path.is_dir() or (path.parent.exists() and not path.parent.is_dir())):
        raise ConfigError(
            f"pcomm train --trace {path}",
            found="a folder" if path.is_dir() else f"{path.parent} is a file",
            why="The trace is one file of JSON.",
            fix="Name a file, such as trace.json; folders above it are made.",
        )
    return path


def _world_size(ranks: int) -> int:
    """How many processes the run has: those we start, or those the launcher has started."""
    launched = os.environ.get("WORLD_SIZE")
    if ranks < 1 or (ranks > 1 and launched is not None):
        raise ConfigError(
            f"pcomm train --ranks {ranks}",
            found=f"WORLD_SIZE={launched}" if launched is not None else "a number below 1",
            why="Ranks are started here or by a launcher such as torchrun, not by both.",
            fix="Leave --ranks away under torchrun; else give a number of at least 1.",
        )
    if launched is None:
        return ranks
    try:
        return int(launched)
    except ValueError:
        raise ConfigError(
            f"pcomm train: WORLD_SIZE={launched!r}",
            found="text that is not a whole number",
            why="The launcher says with it how many processes there are.",
            fix="Start the job with torchrun, or unset WORLD_SIZE.",
        ) from None


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Take SIGTERM for Ctrl-C, so that the ranks save before they stop."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


command = TrainCommand()
