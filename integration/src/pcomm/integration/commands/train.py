"""`pcomm train`: a run from the command line, on one process, on local ranks, or under torchrun."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from pcomm.core import environment
from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.process import logs

if TYPE_CHECKING:
    from pcomm.integration.config.sections import Config
    from pcomm.integration.train.loop import Outcome

__all__ = ["command"]

_INTERRUPTED = 130
_THIS_HOST = ("127.0.0.1", "localhost", "::1")
# What --log-file without a value stands for.
_LOG_IN_RUN = Path("DIR/log.txt")
_EXAMPLES = """\
examples:
  pcomm train --out runs/first --set train.steps=100
      a small GPT on the source of Python's own library
  pcomm train --config my.toml --ranks 2 --out runs/mine
      what my.toml says, on two ranks; the same command goes on after a stop
  pcomm train --config my.toml --ranks 8 --out runs/mine --dry-run
      what that would need of memory and time
  srun --no-kill --kill-on-bad-exit=0 pcomm train --resilient --store HOST:29500 \\
      --config my.toml --out /shared/mine
      on hosts that may die; HOST keeps the store by `pcomm store --port 29500`
  pcomm train --resilient --launcher ray --ranks 6 --config my.toml --out /shared/mine
      on a Ray cluster, which starts ranks again on other nodes
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 \\
      --no-python pcomm train --config my.toml --out /shared/mine --log-file
      on two hosts that share /shared

Every key of --set is listed with its default in docs/reference/configuration.md.
"""
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
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.description = textwrap.fill(self.help)
        parser.epilog = _EXAMPLES
        run = parser.add_argument_group("the run")
        run.add_argument(
            "--out",
            type=Path,
            metavar="DIR",
            help="the run's folder (required, but with --dry-run)",
        )
        run.add_argument("--config", type=Path, metavar="FILE", help="a TOML file (default: none)")
        run.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="SECTION.KEY=VALUE",
            help="change one key of the configuration; may be given several times (default: what "
            "FILE says, else the key's own default, which DIR/config.toml shows)",
        )
        run.add_argument(
            "--restart",
            action="store_true",
            help="remove the checkpoints and metrics in DIR and begin anew (default: go on there)",
        )
        ranks = parser.add_argument_group("ranks")
        ranks.add_argument(
            "--ranks",
            type=int,
            default=1,
            metavar="N",
            help="start N ranks on this machine; not under torchrun, which starts its own "
            "(default: 1)",
        )
        ranks.add_argument(
            "--resilient",
            action="store_true",
            help="go on with the ranks that are left when some die; all of --ranks N on this "
            "machine, or with --store (default: end)",
        )
        ranks.add_argument(
            "--launcher",
            choices=("local", "ray"),
            default="local",
            help="with --resilient: who starts --ranks N and their store; ray: actors of the Ray "
            "cluster of this host, which come back on other nodes (default: local)",
        )
        ranks.add_argument(
            "--store",
            metavar="HOST:PORT",
            help="with --resilient: this process is one rank, which torchrun, Slurm or Kubernetes "
            "has started; the others are found in the store of `pcomm store` there (default: "
            "PCOMM_STORE, else --ranks N are started here)",
        )
        ranks.add_argument(
            "--rank",
            type=int,
            metavar="R",
            help="with --store: the rank of this process (default: as its launcher says)",
        )
        ahead = parser.add_argument_group("before it starts")
        ahead.add_argument(
            "--dry-run",
            action="store_true",
            help="say what the run needs (memory, traffic, time), or why it is refused; start none "
            "(default: train)",
        )
        ahead.add_argument(
            "--cluster",
            type=Path,
            metavar="FILE",
            help="with --dry-run: a TOML file of what ranks compute and send (default: this "
            "machine is measured)",
        )
        told = parser.add_argument_group("what it tells")
        told.add_argument(
            "--log-format",
            choices=("text", "json"),
            default="text",
            help="a line a message, or an object a line (default: text)",
        )
        told.add_argument(
            "--log-file",
            type=Path,
            nargs="?",
            const=_LOG_IN_RUN,
            metavar="FILE",
            help="append messages to a file, too; without FILE to DIR/log.txt (default: stderr "
            "alone)",
        )
        told.add_argument(
            "--trace",
            type=Path,
            metavar="FILE",
            help="write what all ranks did in a few steps, for https://ui.perfetto.dev (default: "
            "nothing)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Train, then print bits per byte, a sample, and where everything is."""
        _check_dry_run(arguments)
        _check_resilient(arguments)
        _check_paths(arguments)
        # Imported late: other commands do not wait for pydantic.
        from pcomm.integration.config.rules import validate
        from pcomm.integration.config.toml import given_keys, load_config
        from pcomm.integration.huggingface.model_from import start_config
        from pcomm.integration.train.interrupt import terminate_as_interrupt

        output = _log_output(arguments)
        logs.configure(
            environment.log_level(),
            int(rank) if (rank := os.environ.get("RANK", "0")).isdecimal() else 0,
            size=2 if "WORLD_SIZE" in os.environ else 1,
            output=output,
        )
        config = load_config(arguments.config, overrides=arguments.set)
        given = given_keys(arguments.config, arguments.set)
        is_new = arguments.restart or arguments.out is None
        config = start_config(config, arguments.out or Path(), is_new=is_new, given=given)
        if _is_rank(arguments):
            with terminate_as_interrupt():
                return _resilient_rank(config, arguments)
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
                is_resilient=arguments.resilient,
            )
            print(needs)
            return 0
        of_rank = (config, arguments.out, arguments.restart, arguments.trace, output)
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
    """Launch a run whose ranks may die, here or on a Ray cluster, and wait for its end.

    Raises:
        KeyboardInterrupt: A second request to stop; the first one is passed on to the ranks.
    """
    from pcomm.integration.commands.train_resilient import exit_code_of, launch_resilient

    launch, is_local = launch_resilient, arguments.launcher == "local"
    if not is_local:
        from pcomm.integration.commands.train_on_ray import launch_on_ray

        launch = launch_on_ray
    output = _log_output(arguments)
    logs.configure(environment.log_level(), 0, size=arguments.ranks, output=output)
    try:
        outcome = launch(
            config, arguments.out, arguments.ranks, must_restart=arguments.restart, output=output
        )
    except PcommError as error:
        if is_local or arguments.debug:
            raise
        logs.tell_error(error)
        return exit_code_of(error)
    _report(config, arguments.out, outcome)
    return _INTERRUPTED if outcome.is_interrupted else 0


def _resilient_rank(config: Config, arguments: argparse.Namespace) -> int:
    """One rank of a run, which another launcher has started."""
    import torch

    from pcomm.core.process import RankPlace
    from pcomm.integration.commands.train_resilient import exit_code_of, resilient_rank

    size = arguments.ranks if arguments.ranks != 1 else None
    place = RankPlace.from_environment(arguments.store, rank=arguments.rank, size=size)
    if place.host in _THIS_HOST and "OMP_NUM_THREADS" not in os.environ:
        # Torch's own number is that of the cores, which this process shares with the other ranks.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.size))
    try:
        outcome = resilient_rank(place, config, arguments.out, _log_output(arguments))
    except PcommError as error:
        if arguments.debug:
            raise
        logs.tell_error(error)
        return exit_code_of(error)
    if outcome is None:
        return 0
    if place.rank == 0:
        _report(config, arguments.out, outcome)
    return _INTERRUPTED if outcome.is_interrupted else 0


def _is_rank(arguments: argparse.Namespace) -> bool:
    """Whether this process is one rank of a resilient run, and no launcher."""
    is_told = arguments.store is not None or "PCOMM_STORE" in os.environ
    is_started = is_told and not arguments.dry_run
    return arguments.resilient and is_started and arguments.launcher == "local"


def _check_resilient(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    is_rank = _is_rank(arguments)
    asks_rank = arguments.store is not None or arguments.rank is not None
    if arguments.launcher != "local" and (asks_rank or not arguments.resilient):
        found = f"--launcher {arguments.launcher} with --store or --rank, or without --resilient"
        why = "It starts all ranks of a resilient run, and a store for them."
        fix = "Give --resilient --launcher ray --ranks N, or leave --launcher away."
    elif asks_rank and not is_rank:
        found = "--store or --rank without --resilient, or --rank without an address"
        why = "They say which rank of a resilient run this process is, and where the others meet."
        fix = "Give --resilient --store HOST:PORT, as `pcomm store` tells it."
    elif arguments.resilient and arguments.trace is not None:
        found = "--trace"
        why = "All ranks give their events at the end, and a rank that has died has none to give."
        fix = "Leave --trace away, or train without --resilient."
    elif is_rank and arguments.restart:
        found = "--restart with a store"
        why = "A rank that its launcher starts again would remove what the others have learnt."
        fix = "Give --out another folder, or remove this one before the job starts."
    elif arguments.resilient and not is_rank and "WORLD_SIZE" in os.environ:
        found = "a launcher such as torchrun, and no store"
        why = "Its ranks need a store that outlives them."
        fix = "Start `pcomm store` and give its address with --store; or start ranks on this "
        fix += "machine with --ranks N, and without WORLD_SIZE."
    elif arguments.resilient and not is_rank and arguments.ranks < 2:
        found = f"--ranks {arguments.ranks}"
        why = "When the only rank dies, none is left to go on."
        fix = "Start at least two, with --ranks N, or leave --resilient away; ranks that another "
        fix += "launcher starts get --store HOST:PORT."
    else:
        return
    raise ConfigError("pcomm train --resilient", found=found, why=why, fix=fix)


def _check_dry_run(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    if arguments.out is None and not arguments.dry_run:
        raise ConfigError(
            "pcomm train",
            found="no --out",
            why="Tokens, checkpoints and metrics of a run are written into a folder of its own.",
            fix="Add --out DIR, which is made if absent, or --dry-run to write nothing.",
        )
    if arguments.cluster is not None and not arguments.dry_run:
        found, why = "no --dry-run", "The file says for which machines a time is predicted."
        fix = "Add --dry-run, or leave --cluster away."
    elif arguments.dry_run and (arguments.store is not None or arguments.rank is not None):
        found = "--store or --rank"
        why = "They are of one rank of a run, and a dry run starts none."
        fix = "Leave them away, and give --ranks N, the number of all ranks."
    else:
        return
    raise ConfigError("pcomm train --dry-run", found=found, why=why, fix=fix)


def _train_local(
    ranks: int, of_rank: tuple[Config, Path, bool, Path | None, logs.LogOutput]
) -> int:
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


def train_rank(
    config: Config,
    run_dir: Path,
    must_restart: bool,
    trace: Path | None,
    output: logs.LogOutput,
) -> int:
    """One rank of `pcomm train`; the first one writes. Returns the exit code."""
    from pcomm.integration.train.interrupt import terminate_as_interrupt

    with terminate_as_interrupt():
        # Imported late: a request to stop is heard while this takes its seconds.
        from pcomm.core import connect
        from pcomm.integration.train.run import run_training

        with connect() as world:
            logs.configure(environment.log_level(), world.rank, size=world.size, output=output)
            outcome = run_training(
                config,
                run_dir,
                must_restart=must_restart,
                stream=logs.progress_stream(output),
                trace=trace,
            )
            if world.rank == 0:
                _report(config, run_dir, outcome)
    return _INTERRUPTED if outcome.is_interrupted else 0


def _report(config: Config, run_dir: Path, outcome: Outcome) -> None:
    """Print how the run ended, a sample, where everything is, and what can be done with it."""
    from pcomm.inference import SamplingParams
    from pcomm.integration.checkpoint.folders import best
    from pcomm.integration.llm import LLM
    from pcomm.integration.train.samples import SAMPLES, prompts_of, write_samples

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
    sample, texts = config.sample, dict[str, str]()
    if prompts := prompts_of(config):
        params = SamplingParams(
            max_tokens=sample.max_tokens, temperature=sample.temperature, seed=config.train.seed
        )
        with LLM(run_dir, max_requests=1, prefix_cache=False) as llm:
            for prompt in prompts:
                texts[prompt] = "".join(part.text for part in llm.stream(prompt, params))
                print(f"\n{prompt}{texts[prompt]}\n")
        # The model is closed: another one may be started.
        write_samples(run_dir, outcome.steps, texts)
    for file, what in (
        ("checkpoints", "weights and optimizer"),
        ("metrics.jsonl", "one row a step"),
        ("loss.png", "the loss as a picture"),
        *([(SAMPLES, "texts that the model has written")] if texts else []),
        ("config.toml", "the configuration"),
    ):
        print(f"{run_dir / file}  {what}")
    if config.checkpoint.keep_best and (found := best(run_dir)) is not None:
        print(f"{found.folder}  the best: {found.state()['bits_per_byte']:.3f} bits per byte")
    folder = shlex.quote(str(run_dir))
    print("next:")
    print(f"  pcomm generate {folder} --prompt {shlex.quote(sample.prompt or 'def')}")
    print(f"  pcomm chat {folder}")
    print(f"  pcomm serve {folder}")
    print(f"  pcomm plot {folder}")
    if (run_dir / "tensorboard").is_dir():
        print(f"  tensorboard --logdir {folder}")


def _log_output(arguments: argparse.Namespace) -> logs.LogOutput:
    """Form and file of the messages."""
    # A dry run writes nothing.
    file = None if arguments.dry_run else arguments.log_file
    if file == _LOG_IN_RUN:
        file = arguments.out / _LOG_IN_RUN.name
    return logs.LogOutput(arguments.log_format == "json", file)


def _check_paths(arguments: argparse.Namespace) -> None:
    """Refuse paths that cannot be used, before anything that takes time is imported."""
    out, trace, log = arguments.out or Path(), arguments.trace, arguments.log_file
    for option, file in (("--config", arguments.config), ("--cluster", arguments.cluster)):
        if file is not None and not file.is_file():
            raise ConfigError(
                f"pcomm train {option}: configuration file {file}",
                found="a folder" if file.is_dir() else "No such file or directory",
                why="It is read before anything else.",
                fix="Give the path of a TOML file"
                + (", or leave it out and use the defaults." if option == "--config" else "."),
            )
    above = next(path for path in (out, *out.parents, Path()) if path.exists())
    if not above.is_dir():
        raise ConfigError(
            f"train: folder {out}",
            found=f"{above} is a file",
            why="The run's tokens, checkpoints and metrics are written there.",
            fix="Choose a folder that can be written, with --out.",
        )
    if trace is not None and (
        trace.is_dir() or (trace.parent.exists() and not trace.parent.is_dir())
    ):
        raise ConfigError(
            f"pcomm train --trace {trace}",
            found="a folder" if trace.is_dir() else f"{trace.parent} is a file",
            why="The trace is one file of JSON.",
            fix="Name a file, such as trace.json; folders above it are made.",
        )
    if log not in (None, _LOG_IN_RUN) and (log.is_dir() or not log.parent.is_dir()):
        raise ConfigError(
            f"pcomm train --log-file {log}",
            found="a folder" if log.is_dir() else f"no folder {log.parent}",
            why="Messages are appended to one file.",
            fix="Name a file in a folder that exists, or give --log-file alone for DIR/log.txt.",
        )


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
