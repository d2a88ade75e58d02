"""A whole training run, from a configuration to a folder with weights, metrics and a sample."""

from __future__ import annotations

import logging
import shutil
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.world import World, connect
from pcomm.integration.atomic_file import atomic_write
from pcomm.integration.checkpoint.folders import Checkpoint, newest, remove_partial
from pcomm.integration.checkpoint.identity import check_same_run, identity_of
from pcomm.integration.checkpoint.saver import Saver, read
from pcomm.integration.config import Config
from pcomm.integration.config_file import to_toml
from pcomm.integration.config_rules import validate
from pcomm.integration.data.batches import TrainBatches
from pcomm.integration.data.preparation import Prepared, open_prepared, prepare
from pcomm.integration.metrics.plot import plot_loss
from pcomm.integration.metrics.run_sinks import open_sinks
from pcomm.integration.metrics.sink import Sink
from pcomm.integration.parallelize import EVERYONE, build_model, open_run_groups
from pcomm.integration.train.evaluate import evaluate
from pcomm.integration.train.interrupt import Interrupt, listen_for_interrupt
from pcomm.integration.train.trainer import Trainer

__all__ = ["Outcome", "run_training"]

_log = logging.getLogger("pcomm.train")

_TOKENISING_S = 24 * 3600.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended; the same on all ranks.

    Args:
        steps: Optimizer steps done, over all starts.
        bits_per_byte: Of the held-out documents after the last step; None if there are none, or
            if the run was interrupted.
        is_interrupted: Whether it was asked to stop before its end.
    """

    steps: int
    bits_per_byte: float | None
    is_interrupted: bool


def run_training(
    config: Config,
    run_dir: Path,
    *,
    must_restart: bool = False,
    stream: TextIO | None = None,
) -> Outcome:
    """Train until the last step of `config`, going on from the newest checkpoint in `run_dir`.

    Collective: every process of the job calls it with the same arguments. It joins the job as
    `connect` does: alone, under torchrun, or as local ranks.

    Args:
        config: As the user wrote it; what is 0 is filled in here.
        run_dir: The run's folder, shared by all ranks; made if absent.
        must_restart: Remove the checkpoints and metrics that are there and begin anew.
        stream: Where progress goes on the first rank; by default `sys.stderr`.

    Raises:
        PcommError: On every rank, before a collective is entered: sizes that do not fit, data
            that cannot be read, a checkpoint of another model.
    """
    with connect() as world, listen_for_interrupt() as interrupt:
        resolved = validate(config, world.size)
        # The others wait while the first rank tokenises, which takes as long as the text is.
        error = _prepare(config, run_dir, world, must_restart)
        world.fail_together("train: data", error, timeout_s=_TOKENISING_S)
        prepared = _open(run_dir, world)
        with open_run_groups(resolved, world) as groups:
            parallel = build_model(resolved, groups, world.device)
            batches = TrainBatches(
                prepared.train,
                seed=resolved.train.seed,
                sequence_length=resolved.train.sequence_length,
                global_batch_tokens=resolved.train.global_batch_tokens,
                micro_batch_tokens=resolved.train.micro_batch_tokens,
            )
            run = _Run(Trainer(parallel, resolved, batches), prepared, run_dir, world)
            return run.go(interrupt, stream or sys.stderr)


def _prepare(
    config: Config, run_dir: Path, world: World, must_restart: bool
) -> PcommError | None:
    """On the first rank: an orderly folder with tokenised text in it; returns what went wrong."""
    if world.rank:
        return None
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for folder in remove_partial(run_dir):
            _log.warning("removed %s, which a run that died left half written", folder)
        if must_restart:
            _remove_results(run_dir)
        # The weights of a run that goes on mean nothing under another tokenizer.
        prepare(config.data, run_dir, keep_tokenizer=newest(run_dir) is not None)
        with atomic_write(run_dir / "config.toml") as file:
            file.write(to_toml(config).encode())
    except PcommError as error:
        return error
    except OSError as error:
        return ConfigError(
            f"train: folder {run_dir}",
            found=str(error),
            why="The run's tokens, checkpoints and metrics are written there.",
            fix="Choose a folder that can be written, with --out.",
        )
    return None


def _open(run_dir: Path, world: World) -> Prepared:
    """What the first rank has prepared, on every rank; a folder that is not shared fails on all."""
    prepared, error = None, None
    try:
        prepared = open_prepared(run_dir)
    except PcommError as problem:
        error = problem
    world.fail_together("train: tokens", error)
    assert prepared is not None
    return prepared


def _remove_results(run_dir: Path) -> None:
    """Remove what training wrote; the tokenised text stays, which other seeds would share."""
    for folder in (run_dir / "checkpoints", run_dir / "tensorboard"):
        shutil.rmtree(folder, ignore_errors=True)
    for file in (run_dir / "metrics.jsonl", run_dir / "loss.png"):
        file.unlink(missing_ok=True)


class _Run:
    """The loop around the trainer: resuming, metrics, evaluation and checkpoints."""

    def __init__(
        self, trainer: Trainer, prepared: Prepared, run_dir: Path, world: World
    ) -> None:
        self.trainer, self.prepared, self.run_dir, self.world = trainer, prepared, run_dir, world
        self.config = trainer.config
        self.identity = identity_of(self.config, prepared.fingerprint)

    def go(self, interrupt: Interrupt, stream: TextIO) -> Outcome:
        checkpoint = newest(self.run_dir)
        first = checkpoint.step if checkpoint is not None else 0
        error: PcommError | None = None
        try:
            self._check(checkpoint)
        except PcommError as problem:
            error = problem
        self.world.fail_together("train: checkpoint", error)
        if checkpoint is not None:
            group = self.trainer.parallel.groups[EVERYONE, "checkpoint"]
            read(checkpoint, self.trainer.regions(), group)
            self.trainer.resume_at(first)
            _log.info("resuming %s after step %d", self.run_dir, first)
        sinks = open_sinks(
            self.run_dir,
            rank=self.world.rank,
            total_steps=self.config.train.steps,
            stream=stream,
            keep_through=first if checkpoint is not None else None,
        )
        with closing(sinks), self._saver() as saver:
            outcome = self._loop(first, interrupt, sinks, saver)
        if self.world.rank == 0:
            plot_loss(self.run_dir / "metrics.jsonl", self.run_dir / "loss.png")
        return outcome

    def _loop(self, first: int, interrupt: Interrupt, sinks: Sink, saver: Saver) -> Outcome:
        train = self.config.train
        done = first
        while done < train.steps:
            result = self.trainer.step(done, is_asked_to_stop=interrupt.is_requested)
            done += 1
            sinks.write(result.row)
            if done == train.steps:
                break
            # Evaluated before it is saved: a run that dies in between evaluates again.
            if train.eval_every and done % train.eval_every == 0:
                sinks.write(self._evaluation(done))
            is_due = self.config.checkpoint.every and done % self.config.checkpoint.every == 0
            if is_due or result.wants_to_stop:
                self._save(saver, done)
            if result.wants_to_stop:
                return Outcome(done, None, is_interrupted=True)
        row = self._evaluation(done)
        if first < done:
            sinks.write(row)
            self._save(saver, done)
        return Outcome(done, row.get("bits_per_byte"), is_interrupted=False)

    def _evaluation(self, step: int) -> dict[str, float]:
        bits = evaluate(self.trainer.parallel, self.prepared.held_out, self.config)
        return {"step": step} if bits is None else {"step": step, "bits_per_byte": bits}

    def _save(self, saver: Saver, step: int) -> None:
        saver.save(step, self.trainer.regions(), {"identity": self.identity})

    def _saver(self) -> Saver:
        options = self.config.checkpoint
        return Saver(
            self.run_dir,
            self.trainer.parallel.groups[EVERYONE, "checkpoint"],
            keep=options.keep,
            is_asynchronous=options.asynchronous,
        )

    def _check(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is None:
            return
        check_same_run(checkpoint, self.identity)
        if checkpoint.step > self.config.train.steps:
            raise ConfigError(
                f"train.steps = {self.config.train.steps}",
                found=f"a checkpoint after step {checkpoint.step} in {self.run_dir}",
                why="The run is already longer than it should become.",
                fix=f"Set train.steps to at least {checkpoint.step}, or start over with --restart.",
            )
