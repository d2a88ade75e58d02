"""A plain run: checks on all ranks, its folder, resuming, steps, checkpoints and the trace.

From the command to a loss, read `commands/train`, `config/toml`, `config/sections`,
`config/rules`, this module, `data/batches`, `parallelize`, `replicas`, `models/language_model`,
`models/attention`, `trainer` and `loop`; a first run also prepares its folder and its text.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import torch
from torch.profiler import record_function

from pcomm.core import Group, Groups, connect
from pcomm.core.trace import (
    Recorder,
    exposed_communication_s,
    gather_events,
    traced_groups,
    write_chrome_trace,
)
from pcomm.integration.checkpoint.folders import check_files, newest
from pcomm.integration.checkpoint.saver import Saver
from pcomm.integration.checkpoint.state import identity_of
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config
from pcomm.integration.data.preparation import Prepared, open_prepared
from pcomm.integration.huggingface.model_from import start_config
from pcomm.integration.huggingface.weights import load_first_weights
from pcomm.integration.metrics.picture import draw_loss
from pcomm.integration.metrics.sinks import Sink, SinkGroup, open_sinks
from pcomm.integration.parallelize import ALL_RANKS, build_model, open_run_groups, splitting_groups
from pcomm.integration.precision import tell_device
from pcomm.integration.train.compiled_blocks import CompiledBlocks, check_compiler
from pcomm.integration.train.interrupt import RankBarrier, Stopped, listen_for_interrupt
from pcomm.integration.train.loop import (
    Outcome,
    batches_of,
    describe_run,
    evaluate,
    is_due,
    open_saver,
    read_checkpoint,
)
from pcomm.integration.train.run_folder import (
    check_resumable,
    check_shared,
    hold_folder,
    prepare_folder,
    write_config,
    write_holder,
)
from pcomm.integration.train.run_state import NotFiniteSteps, Progress, chosen_dtype
from pcomm.integration.train.samples import continue_prompts, tell_samples
from pcomm.integration.train.speed import StepProfile, own_flops
from pcomm.integration.train.trainer import StepResult, Trainer, check_batch_memory, largest_memory

__all__ = ["Outcome", "run_training"]

_log = logging.getLogger("pcomm.train")
_TOKENISING_S = 24 * 3600.0
_READING_S = 4 * 3600.0
# The first rank may wait for a server that does not answer.
_TRACKING_S = 300.0


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
        together = RankBarrier(world, interrupt)
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
    together: RankBarrier,
) -> Outcome:
    world = together.world
    with ExitStack() as held:
        config = together(
            "train: model.from", lambda: start_config(config, run_dir, is_new=must_restart)
        )
        resolved = validate(_with_dtype(config, run_dir, must_restart, together), world.size)
        together(
            "train: memory of a batch",
            lambda: check_batch_memory(resolved, largest_memory(world.device)),
        )
        if resolved.train.compile:
            together("train: train.compile", lambda: check_compiler(world.device))
        if not must_restart:
            # Before anything in the folder changes, so that a refused run leaves it as it was.
            together("train: checkpoint", lambda: check_resumable(resolved, run_dir))

        def hold() -> None:
            if world.rank == 0:
                held.enter_context(hold_folder(run_dir))
                write_holder(run_dir, world)

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
            steps = StepTrace(trace, world.rank, groups[ALL_RANKS, "control"], world.device)
            watched = steps.watched(groups)
            model = build_model(resolved, watched, world.device)
            if resolved.model.from_ and newest(run_dir) is None:
                folder = Path(resolved.model.from_)
                ranks = {key: group.rank for key, group in splitting_groups(watched).items()}
                together(
                    "train: weights of model.from",
                    lambda: load_first_weights(model, folder, ranks),
                    timeout_s=_READING_S,
                )
            _log.info("%s\n%s", model.describe(), describe_run(resolved, prepared))
            compiled = CompiledBlocks(model) if resolved.train.compile else None
            trainer = Trainer(
                model,
                watched,
                resolved,
                batches_of(resolved, prepared),
                recorder=steps.recorder,
                peak_flops=own_flops(resolved.train, world.device) * world.size,
            )
            run = _Run(trainer, prepared, run_dir, together, steps, compiled)
            progress = run.resume()
            # Written late: a run that is refused must not change what `pcomm generate` reads.
            together(
                "train: configuration",
                lambda: None if world.rank else write_config(config, run_dir),
            )
            return run.go(progress, stream)


def _with_dtype(config: Config, run_dir: Path, is_new: bool, together: RankBarrier) -> Config:
    """`config` with the format that all ranks compute in, which is told. Collective."""
    world = together.world
    dtype, why = together(
        "train: train.dtype", lambda: chosen_dtype(config, run_dir, world.device, is_new=is_new)
    )
    vote = world.control.vote("train: train.dtype", int(dtype == "bf16"), why)
    dtype = "bf16" if vote.minimum else "fp32"
    why = vote.reasons[vote.values.index(vote.minimum)]
    tell_device(dtype, why, world.size, world.device, rank=world.rank)
    return replace(config, train=replace(config.train, dtype=dtype))


class _Run:
    """The loop around the trainer: resuming, metrics, evaluation and checkpoints."""

    def __init__(
        self,
        trainer: Trainer,
        prepared: Prepared,
        run_dir: Path,
        together: RankBarrier,
        trace: StepTrace,
        compiled: CompiledBlocks | None,
    ) -> None:
        self.together, self.world, self.trace = together, together.world, trace
        self.trainer, self.prepared, self.run_dir = trainer, prepared, run_dir
        self.compiled = compiled
        self.config = trainer.config
        self.identity = identity_of(self.config, prepared.fingerprint)
        self.checkpoint_group = trainer.groups[ALL_RANKS, "checkpoint"]
        steps, folder = self.config.train.profile_steps, run_dir / "profile"
        self.profile = StepProfile(steps, folder, self.world.rank, self.world.device)

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
        read_checkpoint(checkpoint, self.trainer.shard_views(), self.checkpoint_group)
        self.trainer.resume_at(progress.step, skipped=progress.skipped, rewarm=progress.rewarm)
        if progress.rows is not None:
            self.trainer.batches.go_on(progress.step, progress.rows)
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
                config=self.config,
            ),
            timeout_s=_TRACKING_S,
        )
        with closing(sinks), open_saver(self.config, self.run_dir, self.checkpoint_group) as saver:
            outcome = self._loop(progress, sinks, saver)
        self.profile.end()
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
            self.profile.begin(done + 1)
            with self.trace.step():
                is_asked_to_stop = interrupt.is_requested or sinks.error is not None
                result = self.trainer.step(done, is_asked_to_stop=is_asked_to_stop)
            if self.compiled is not None and done == first:
                _log.info("%s", self.compiled.describe())
            done += 1
            self._check_finite(result, saver)
            sinks.write(result.row)
            if done == train.steps:
                break
            # Evaluated before it is saved: a run that dies in between evaluates again.
            due = is_due(train.eval_every, done)
            bits = self._evaluate(done, sinks) if due else None
            self.profile.end(done)
            if train.sample_every and is_due(train.sample_every, done):
                self._sample(done)
            if is_due(self.config.checkpoint.every, done) or result.wants_to_stop:
                self._save(saver, done, bits)
            if result.wants_to_stop:
                return Outcome(done, None, is_interrupted=True)
        # A run that was finished before has its row already.
        bits = None
        if train.eval_every != "none":
            bits = self._evaluate(done, sinks if first < done else None)
        if first < done:
            self._save(saver, done, bits)
        return Outcome(done, bits, is_interrupted=False)

    def _evaluate(self, step: int, sinks: Sink | None) -> float | None:
        trainer, start = self.trainer, time.perf_counter()
        with record_function("evaluation"), self._eagerly():
            bits = evaluate(trainer.model, trainer.groups, self.prepared.held_out, self.config)
        if sinks is not None and bits is not None:
            taken_s = time.perf_counter() - start
            sinks.write({"step": step, "bits_per_byte": bits, "eval_s": taken_s})
        return bits

    def _eagerly(self) -> AbstractContextManager[object]:
        return nullcontext() if self.compiled is None else self.compiled.taken_out()

    def _sample(self, step: int) -> None:
        """Continue the prompts, and write and tell what came of it. Collective."""
        trainer, tokenizer = self.trainer, self.prepared.tokenizer
        with self._eagerly():
            texts = continue_prompts(trainer.model, trainer.groups, self.config, tokenizer)
        if self.world.rank == 0:
            tell_samples(self.run_dir, step, texts)

    def _check_finite(self, result: StepResult, saver: Saver) -> None:
        if result.is_finite:
            self.not_finite.record_finite()
            return
        culprit = self.trainer.first_not_finite()
        # The checkpoint that is being written may be the last good one.
        saver.wait()
        row = result.row
        self.not_finite.record_not_finite(int(row["step"]), row["loss"], row["grad_norm"], culprit)
        row["skipped"] = self.not_finite.skipped

    def _save(self, saver: Saver, step: int, bits: float | None) -> None:
        rows = self.trainer.batches.rows_before(step)
        progress = Progress(step, self.not_finite.skipped, self.trainer.rewarm, rows)
        state = {"identity": self.identity, **progress.state(self.config.train)}
        if bits is not None and math.isfinite(bits):
            state["bits_per_byte"] = bits
        saver.save(step, self.trainer.shard_views(), state)


# The first step of a start allocates, and connects what is connected when it is used first.
_BEGIN, _END = 1, 4


class StepTrace:
    """Records the second to fourth step of this start, and writes them as soon as they are done.

    A run that has fewer steps left writes what there was of them when it ends.

    Args:
        path: The file; None to record nothing.
        rank: Global rank of this process.
        control: All ranks; carries the events and is not traced.
        device: Device of this rank.
    """

    def __init__(
        self, path: Path | None, rank: int, control: Group, device: torch.device | None = None
    ) -> None:
        self.recorder = Recorder(rank, is_on=False, device=device)
        self._path, self._control = path, control
        self._steps = self._recorded = 0

    def watched(self, groups: Groups) -> Groups:
        """`groups` whose operations are recorded; themselves if nothing is. Local."""
        return groups if self._path is None else traced_groups(groups, self.recorder)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around every step. Collective after the last one that is recorded."""
        self.recorder.is_on = self._path is not None and _BEGIN <= self._steps < _END
        try:
            with self.recorder.span("step", queue="steps"):
                yield
        finally:
            self._recorded += self.recorder.is_on
            self.recorder.is_on = False
        self._steps += 1
        if self._steps == _END:
            self.finish()

    def finish(self) -> None:
        """Write what was recorded and not yet written. Collective."""
        if self._path is None or not self._recorded:
            return
        events = gather_events(self.recorder, self._control.collectives)
        if self._control.rank == 0:
            exposed_ms = exposed_communication_s(events) / self._recorded * 1e3
            try:
                write_chrome_trace(self._path, events)
            except OSError as error:
                # The run is worth more than its trace.
                _log.warning("no trace in %s: %s", self._path, error)
            else:
                _log.info(
                    "trace in %s: %.1f ms a step of communication exposed", self._path, exposed_ms
                )
        self.recorder.clear()
        self._recorded = 0
