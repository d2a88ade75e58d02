"""`pcomm train`: a run from the command line, on one process, on local ranks, or under torchrun."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pcomm.core import environment
from pcomm.core.errors import ConfigError
from pcomm.core.process import logs

if TYPE_CHECKING:
    from pcomm.integration.config.sections import Config
    from pcomm.integration.train.loop import Outcome

__all__ = ["command"]

_INTERRUPTED = 130
# What a rank imports late. Its optimizer asks for Dynamo.
_OF_EVERY_RANK = ("pcomm.integration.train.run", "torch._dynamo")


class TrainCommand:
    """Trains a model and shows what it has learnt."""

    name = "train"
    help = (
        "Train a language model (GPT, Mamba-2, Gated DeltaNet, hybrids; with experts) on text "
        "files, or on Python's own library; goes on where it stopped."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """`--config`, `--set`, `--ranks`, `--out`, `--restart`, `--dry-run` and more."""
        parser.add_argument(
            "--config", type=Path, metavar="FILE", help="a TOML file (default: none)"
        )
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="SECTION.KEY=VALUE",
            help="change one key of the configuration; may be given several times (default: what "
            "FILE says, else the key's own default, which DIR/config.toml shows)",
        )
        parser.add_argument(
            "--ranks",
            type=int,
            default=1,
            metavar="N",
            help="start N ranks on this machine (default: 1)",
        )
        parser.add_argument(
            "--out", type=Path, required=True, metavar="DIR", help="the run's folder (required)"
        )
        parser.add_argument(
            "--restart",
            action="store_true",
            help="remove the checkpoints and metrics in DIR and begin anew (default: go on there)",
        )
        parser.add_argument(
            "--trace",
            type=Path,
            metavar="FILE",
            help="write what all ranks did in a few steps, for https://ui.perfetto.dev (default: "
            "nothing)",
        )
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="say what the run needs (memory, traffic, time), or why it is refused; start none",
        )
        parser.add_argument(
            "--cluster",
            type=Path,
            metavar="FILE",
            help="with --dry-run: a TOML file of what ranks compute and send; without it this "
            "machine is measured",
        )
        parser.add_argument(
            "--resilient",
            action="store_true",
            help="go on with the ranks that are left when some of --ranks N die (default: end)",
        )
        parser.add_argument(
            "--join",
            metavar="HOST:PORT",
            help="with --resilient: come back as --rank R of the run whose launcher is there",
        )
        parser.add_argument("--rank", type=int, metavar="R", help="the rank that comes back")

    def run(self, arguments: argparse.Namespace) -> int:
        """Train, then print bits per byte, a sample, and where everything is."""
        # Imported late: other commands do not wait for pydantic.
        from pcomm.integration.config.rules import validate
        from pcomm.integration.config.toml import given_keys, load_config
        from pcomm.integration.huggingface.model_from import start_config
        from pcomm.integration.train.interrupt import terminate_as_interrupt

        _check_resilient(arguments)
        _check_dry_run(arguments)
        if arguments.join is not None:
            with terminate_as_interrupt():
                return _joined(arguments)
        config = load_config(arguments.config, overrides=arguments.set)
        given = given_keys(arguments.config, arguments.set)
        config = start_config(config, arguments.out, is_new=arguments.restart, given=given)
        world_size = _world_size(arguments.ranks)
        if not arguments.resilient:
            validate(config, world_size)
        if arguments.dry_run:
            # Imported late: until here a mistake is reported without waiting for torch.
            from pcomm.integration.forecast.dry_run import dry_run

            needs = dry_run(
                config,
                arguments.out,
                world_size,
                must_restart=arguments.restart,
                cluster=arguments.cluster,
            )
            print(needs)
            return 0
        of_rank = (config, arguments.out, arguments.restart, _trace_file(arguments.trace))
        try:
            with terminate_as_interrupt():
                if arguments.resilient:
                    return _resilient(config, arguments)
                if arguments.ranks == 1:
                    return train_rank(*of_rank)
                return _train_local(arguments.ranks, of_rank)
        except KeyboardInterrupt:
            return _stopped_at_once()


def _stopped_at_once() -> int:
    """Say how the run goes on; returns the exit code."""
    print(
        "stopped at once; the same command goes on from the newest checkpoint, or begins",
        file=sys.stderr,
    )
    return _INTERRUPTED


def _resilient(config: Config, arguments: argparse.Namespace) -> int:
    """The launcher of a run whose ranks may die; it keeps their store and restarts nothing.

    Raises:
        KeyboardInterrupt: A second request to stop; the first one is passed on to the ranks.
    """
    from pcomm.integration.commands.train_resilient import launch_resilient

    logs.configure(environment.log_level(), 0)
    outcome = launch_resilient(
        config, arguments.out, arguments.ranks, must_restart=arguments.restart
    )
    _report(config, arguments.out, outcome)
    return _INTERRUPTED if outcome.is_interrupted else 0


def _joined(arguments: argparse.Namespace) -> int:
    """A process that takes the place of a rank that has died."""
    from pcomm.integration.commands.train_resilient import join_resilient

    outcome = join_resilient(arguments.join, arguments.rank, arguments.out)
    return _INTERRUPTED if outcome.is_interrupted else 0


def _check_resilient(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    joins = arguments.join is not None or arguments.rank is not None
    of_launcher = {
        "--config": arguments.config is not None,
        "--set": bool(arguments.set),
        "--ranks": arguments.ranks != 1,
        "--restart": arguments.restart,
    }
    given = ", ".join(option for option, is_given in of_launcher.items() if is_given)
    if joins and (not arguments.resilient or arguments.join is None or arguments.rank is None):
        found = "--join or --rank without the other two"
        why = "A rank that comes back names the run and its place there."
        fix = "Give --resilient --join HOST:PORT --rank R."
    elif joins and given:
        found = f"--join with {given}"
        why = "A rank that comes back trains what the others train: the launcher tells it."
        fix = f"Leave {given} away; a run with other settings is started with --ranks N."
    elif arguments.resilient and not joins and arguments.ranks < 2:
        found = f"--ranks {arguments.ranks}"
        why = "When the only rank dies, none is left to go on."
        fix = "Start at least two, with --ranks N, or leave --resilient away."
    elif arguments.resilient and arguments.trace is not None:
        found = "--trace"
        why = "All ranks give their events at the end, and a rank that has died has none to give."
        fix = "Leave --trace away, or train without --resilient."
    elif arguments.resilient and not joins and "WORLD_SIZE" in os.environ:
        found = "a launcher such as torchrun"
        why = "It ends all ranks when one dies."
        fix = "Start pcomm train --resilient by itself, with --ranks N, and without WORLD_SIZE."
    else:
        return
    raise ConfigError("pcomm train --resilient", found=found, why=why, fix=fix)


def _check_dry_run(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    if arguments.cluster is not None and not arguments.dry_run:
        found, why = "no --dry-run", "The file says for which machines a time is predicted."
        fix = "Add --dry-run, or leave --cluster away."
    elif arguments.dry_run and arguments.resilient:
        found, why = "--resilient", "The step of a run whose ranks may die is not counted."
        fix = "Leave --resilient away to count the run of the same ranks without it."
    else:
        return
    raise ConfigError("pcomm train --dry-run", found=found, why=why, fix=fix)


def _train_local(ranks: int, of_rank: tuple[Config, Path, bool, Path | None]) -> int:
    # Imported late: until here a mistake is reported without waiting for torch.
    from pcomm.core import run_local
    from pcomm.core.process import RankError

    threads = max(1, (os.cpu_count() or 1) // ranks)
    try:
        return int(
            run_local(train_rank, ranks, of_rank, threads=threads, preload=_OF_EVERY_RANK)[0]
        )
    except RankError as error:
        print(error, file=sys.stderr)
        return 1


def train_rank(config: Config, run_dir: Path, must_restart: bool, trace: Path | None) -> int:
    """One rank of `pcomm train`; the first one writes. Returns the exit code."""
    from pcomm.integration.train.interrupt import terminate_as_interrupt

    with terminate_as_interrupt():
        # Imported late: a request to stop is heard while this takes its seconds.
        from pcomm.core import connect
        from pcomm.integration.train.run import run_training

        with connect() as world:
            logs.configure(environment.log_level(), world.rank)
            outcome = run_training(config, run_dir, must_restart=must_restart, trace=trace)
            if world.rank == 0:
                _report(config, run_dir, outcome)
    return _INTERRUPTED if outcome.is_interrupted else 0


def _report(config: Config, run_dir: Path, outcome: Outcome) -> None:
    """Print how the run ended, a sample, where everything is, and what can be done with it."""
    from pcomm.inference import SamplingParams
    from pcomm.integration.checkpoint.folders import best
    from pcomm.integration.llm import LLM

    if outcome.is_interrupted:
        print(
            f"stopped after step {outcome.steps}; the same command goes on from there"
            if outcome.steps
            else "stopped before the first step; the same command begins again"
        )
        return
    if config.train.eval_every == "none":
        print('no bits per byte (train.eval_every = "none")')
    elif outcome.bits_per_byte is None:
        print("no held-out documents, so no bits per byte (data.held_out = 0)")
    else:
        print(f"held-out bits per byte: {outcome.bits_per_byte:.3f}")
    sample = config.sample
    if sample.prompt and sample.max_tokens:
        params = SamplingParams(
            max_tokens=sample.max_tokens, temperature=sample.temperature, seed=config.train.seed
        )
        with LLM(run_dir, max_requests=1, prefix_cache=False) as llm:
            text = "".join(part.text for part in llm.stream(sample.prompt, params))
        print(f"\n{sample.prompt}{text}\n")
    for file, what in (
        ("checkpoints", "weights and optimizer"),
        ("metrics.jsonl", "one row a step"),
        ("loss.png", "the loss as a picture"),
        ("config.toml", "the configuration"),
    ):
        print(f"{run_dir / file}  {what}")
    if config.checkpoint.keep_best and (found := best(run_dir)) is not None:
        print(f"{found.folder}  the best: {found.state()['bits_per_byte']:.3f} bits per byte")
    folder = shlex.quote(str(run_dir))
    print("next:")
    print(f"  pcomm generate {folder} --prompt {shlex.quote(sample.prompt or 'def')}")
    print(f"  pcomm serve {folder}")
    if (run_dir / "tensorboard").is_dir():
        print(f"  tensorboard --logdir {folder}")


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
    if not launched.isdecimal() or not int(launched):
        raise ConfigError(
            f"pcomm train: WORLD_SIZE={launched!r}",
            found="text that is no whole number above 0",
            why="The launcher says with it how many processes there are.",
            fix="Start the job with torchrun, or unset WORLD_SIZE.",
        )
    return int(launched)


command = TrainCommand()
