"""A whole training run, from a configuration to a folder with weights, metrics and a sample."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Literal, TextIO

from pcomm.core import connect
from pcomm.integration.checkpoint.checksums import check_files
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.checkpoint.identity import identity_of
from pcomm.integration.checkpoint.reader import read
from pcomm.integration.checkpoint.saver import Saver
from pcomm.integration.config import Config
from pcomm.integration.config_rules import validate
from pcomm.integration.data.batches import TrainBatches
from pcomm.integration.data.preparation import Prepared, open_prepared
from pcomm.integration.huggingface.run_start import ModelStart, start_config
from pcomm.integration.metrics.plot import draw_loss
from pcomm.integration.metrics.run_sinks import open_sinks
from pcomm.integration.metrics.sink import Sink, SinkGroup
from pcomm.integration.parallelize import (
    ALL_RANKS,
    build_model,
    open_run_groups,
    splitting_groups,
)
from pcomm.integration.train.batch_memory import check_batch_memory, largest_memory
from pcomm.integration.train.evaluate import evaluate
from pcomm.integration.train.interrupt import listen_for_interrupt
from pcomm.integration.train.not_finite import NotFiniteSteps
from pcomm.integration.train.outcome import Outcome
from pcomm.integration.train.precision import tell_device
from pcomm.integration.train.progress import Progress
from pcomm.integration.train.run_folder import (
    check_resumable,
    check_shared,
    hold_folder,
    prepare_folder,
    tell_holder,
    write_config,
)
from pcomm.integration.train.step_trace import StepTrace
from pcomm.integration.train.together import Stopped, Together
from pcomm.integration.train.trainer import StepResult, Trainer

__all__ = ["Outcome", "run_training"]

_log = logging.getLogger("pcomm.train")

_TOKENISING_S = 24 * 3600.0
_READING_S = 4 * 3600.0


def run_training(
    config: Config,
    run_dir: Path,
    *,
    must_restart: bool = False,
    stream: TextIO | None = None,
    trace: Path | None = None,
) -> Outcome:
    """Train until the last step of `config`, going on from the newest checkpoint in `run_dir`.

    Collective: every process of the job calls it with the same arguments. It joins the job as
    `connect` does: alone, under torchrun, or as local ranks.

    Args:
        config: The configuration as the user wrote it, before `validate`.
        run_dir: Folder of the run, shared by all ranks; made if absent.
        must_restart: True to remove the checkpoints and metrics that are there and begin anew.
        stream: Stream of the progress on the first rank; None for `sys.stderr`.
        trace: File in which the first rank writes what all ranks did in a few steps; None for no
            trace.

    Raises:
        PcommError: On every rank, before a collective is entered: sizes that do not fit, data
            that cannot be read, a checkpoint of another model, another run in the folder.
        NotFiniteError: On every rank: see `train.on_nan`.
        KeyboardInterrupt: On a rank that is asked to stop a second time, which ends it at once.
    """
    with connect() as world, listen_for_interrupt() as interrupt:
        together = Together(world, interrupt)
        try:
            return _train(config, run_dir, must_restart, stream or sys.stderr, trace, together)
        except Stopped:
            checkpoint = None if must_restart else newest(run_dir)
            return Outcome(checkpoint.step if checkpoint else 0, None, is_interrupted=True)


def _train(
    config: Config,
    run_dir: Path,
    must_restart: bool,
    stream: TextIO,
    trace: Path | None,
    together: Together,
) -> Outcome:
    world = together.world
    tell_device(config.train.dtype, world.size, world.device, rank=world.rank)
    with ExitStack() as held:
        config = together(
            "train: model.from", lambda: start_config(config, run_dir, is_new=must_restart)
        )
        resolved = validate(config, world.size)
        together(
            "train: memory of a batch",
            lambda: check_batch_memory(resolved, largest_memory(world.device)),
        )
        if not must_restart:
            # Before anything in the folder changes, so that a refused run leaves it as it was.
            together("train: checkpoint", lambda: check_resumable(resolved, run_dir))

        def hold() -> None:
            if world.rank == 0:
                held.enter_context(hold_folder(run_dir))
                tell_holder(run_dir, world)

        together("train: folder", hold)
        together("train: folder of all hosts", lambda: check_shared(run_dir, world))

        def prepare() -> None:
            if world.rank == 0:
                with together.interrupt.ends_at_once():
                    prepare_folder(resolved, run_dir, must_restart=must_restart)

        # The others wait while the first rank tokenises, which takes as long as the text is.
        together("train: data", prepare, timeout_s=_TOKENISING_S)
        prepared = together("train: tokens", lambda: open_prepared(run_dir))
        with open_run_groups(resolved, world) as groups:
            steps = StepTrace(trace, world.rank, groups[ALL_RANKS, "control"])
            watched = steps.watched(groups)
            model = build_model(resolved, watched, world.device)
            if resolved.model.from_ and newest(run_dir) is None:
                start = ModelStart(Path(resolved.model.from_))
                ranks = {key: group.rank for key, group in splitting_groups(watched).items()}
                together(
                    "train: weights of model.from",
                    lambda: start.load(model, ranks),
                    timeout_s=_READING_S,
                )
            _log.info("%s", model.describe())
            batches = TrainBatches(
                prepared.train,
                seed=resolved.train.seed,
                sequence_length=resolved.train.sequence_length,
                global_batch_tokens=resolved.train.global_batch_tokens,
                micro_batch_tokens=resolved.train.micro_batch_tokens,
            )
            trainer = Trainer(model, watched, resolved, batches, recorder=steps.recorder)
            run = _Run(trainer, prepared, run_dir, together, steps)
            progress = run.resume()
            # Written late: a run that is refused must not change what `pcomm generate` reads.
            together(
                "train: configuration",
                lambda: None if world.rank else write_config(config, run_dir),
            )
            return run.go(progress, stream)


class _Run:
    """The loop around the trainer: resuming, metrics, evaluation and checkpoints."""

    def __init__(
        self,
        trainer: Trainer,
        prepared: Prepared,
        run_dir: Path,
        together: Together,
        trace: StepTrace,
    ) -> None:
        self.together, self.world, self.trace = together, together.world, trace
        self.trainer, self.prepared, self.run_dir = trainer, prepared, run_dir
        self.config = trainer.config
        self.identity = identity_of(self.config, prepared.fingerprint)
        self.checkpoint_group = trainer.groups[ALL_RANKS, "checkpoint"]

    def resume(self) -> Progress:
        """Read the newest checkpoint, if there is one; returns how far the run is."""
        corpus = self.prepared.fingerprint
        self.together(
            "train: checkpoint", lambda: check_resumable(self.config, self.run_dir, corpus)
        )
        checkpoint = newest(self.run_dir)
        if checkpoint is None:
            return Progress()
        progress = self.together(
            "train: progress", lambda: Progress.resumed(checkpoint, self.config.train)
        )
        # Each rank reads a share of the files.
        rank, size = self.world.rank, self.world.size
        self.together(
            "train: checksums",
            lambda: check_files(checkpoint, rank=rank, size=size),
            timeout_s=_READING_S,
        )
        views = self.trainer.shard_views()
        if checkpoint.step == 0:
            # Converted from a directory of weights: the optimizer begins anew.
            views = {name: view for name, view in views.items() if name.startswith("model.")}
        read(checkpoint, views, self.checkpoint_group)
        self.trainer.resume_at(progress.step, skipped=progress.skipped, rewarm=progress.rewarm)
        _log.info("resuming %s after step %d", self.run_dir, checkpoint.step)
        return progress

    def go(self, progress: Progress, stream: TextIO) -> Outcome:
        """Train on from where the run is."""
        first = progress.step
        sinks = self.together(
            "train: metrics",
            lambda: open_sinks(
                self.run_dir,
                rank=self.world.rank,
                total_steps=self.config.train.steps,
                stream=stream,
                keep_through=first or None,
            ),
        )
        with closing(sinks), self._saver() as saver:
            outcome = self._loop(progress, sinks, saver)
        self.trace.finish()
        self.world.fail_together("train: metrics", sinks.error)
        if self.world.rank == 0:
            draw_loss(self.run_dir)
        return outcome

    def _loop(self, progress: Progress, sinks: SinkGroup, saver: Saver) -> Outcome:
        train, interrupt = self.config.train, self.together.interrupt
        done = first = progress.step
        self.not_finite = NotFiniteSteps(train, self.run_dir, skipped=progress.skipped)
        while done < train.steps:
            with self.trace.step():
                is_asked_to_stop = interrupt.is_requested or sinks.error is not None
                result = self.trainer.step(done, is_asked_to_stop=is_asked_to_stop)
            done += 1
            self._check_finite(result, saver)
            sinks.write(result.row)
            if done == train.steps:
                break
            # Evaluated before it is saved: a run that dies in between evaluates again.
            if _is_due(train.eval_every, done):
                self._evaluate(done, sinks)
            if _is_due(self.config.checkpoint.every, done) or result.wants_to_stop:
                self._save(saver, done)
            if result.wants_to_stop:
                return Outcome(done, None, is_interrupted=True)
        # A run that was finished before has its row already.
        bits = None
        if train.eval_every != "none":
            bits = self._evaluate(done, sinks if first < done else None)
        if first < done:
            self._save(saver, done)
        return Outcome(done, bits, is_interrupted=False)

    def _evaluate(self, step: int, sinks: Sink | None) -> float | None:
        trainer = self.trainer
        bits = evaluate(trainer.model, trainer.groups, self.prepared.held_out, self.config)
        if sinks is not None and bits is not None:
            sinks.write({"step": step, "bits_per_byte": bits})
        return bits

    def _check_finite(self, result: StepResult, saver: Saver) -> None:
        if result.is_finite:
            self.not_finite.note_good()
            return
        culprit = self.trainer.first_not_finite()
        # The checkpoint that is being written may be the last good one.
        saver.wait()
        row = result.row
        self.not_finite.note_bad(int(row["step"]), row["loss"], row["grad_norm"], culprit)
        row["skipped"] = self.not_finite.skipped

    def _save(self, saver: Saver, step: int) -> None:
        progress = Progress(step, self.not_finite.skipped, self.trainer.rewarm)
        state = {"identity": self.identity, **progress.state(self.config.train)}
        saver.save(step, self.trainer.shard_views(), state)

    def _saver(self) -> Saver:
        options = self.config.checkpoint
        return Saver(
            self.run_dir,
            self.checkpoint_group,
            keep=None if options.keep == "all" else options.keep,
            is_asynchronous=options.asynchronous,
        )


def _is_due(every: int | Literal["end", "none"], step: int) -> bool:
    return isinstance(every, int) and step % every == 0
