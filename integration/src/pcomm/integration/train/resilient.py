"""A resilient run: build, restore, attempts, and checkpoints of whole tensors."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pcomm.core import Collectives, Group, Groups, Topology
from pcomm.core.checkpoint import ShardView
from pcomm.core.errors import ClosedError
from pcomm.core.process import RankPlace, this_host
from pcomm.core.tensor_parallel import ParamLayout, join_shards, param_layouts_of
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.checkpoint.state import identity_of, planned_shard_views, set_optimizer_step
from pcomm.integration.config.sections import Resolved
from pcomm.integration.config.toml import to_dict
from pcomm.integration.config.units import units_of_model
from pcomm.integration.data.preparation import Prepared, open_prepared
from pcomm.integration.metrics.sinks import SharedRows
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.parallelize import ALL_RANKS, PLANNED_NAMES, build_model
from pcomm.integration.replicas import (
    PlannedReplicas,
    group_names,
    group_specs,
    replicas_left,
    used_ranks,
)
from pcomm.integration.train.interrupt import Interrupt, listen_for_interrupt
from pcomm.integration.train.loop import (
    Outcome,
    batches_of,
    describe_run,
    evaluate,
    is_due,
    open_saver,
    read_checkpoint,
)
from pcomm.integration.train.optimizers import ParameterKinds, make_optimizer
from pcomm.integration.train.run_state import NotFiniteSteps, Progress
from pcomm.integration.train.samples import continue_prompts, tell_samples
from pcomm.integration.train.speed import own_flops
from pcomm.integration.train.trainer import Trainer
from pcomm.ntp import NtpPlan, Session, TrainState
from pcomm.ntp.redistribute import shard_views
from pcomm.ntp.session import Attempt, Timeouts, Transition

__all__ = ["GatheredSaver", "ResilientRun", "cause"]

_log = logging.getLogger("pcomm.train")


class ResilientRun:
    """One rank of a run whose other ranks may die, and come back.

    A generation of ranks has a model, groups and batches of its own; what lasts is the state of the
    session. One rank writes the metrics; a rank of the canonical replica writes the
    checkpoints, with whole tensors, so that no file depends on who is there.

    A rank beyond those of the grid is spare: it waits without a model, and takes the place of one
    that has died.

    With `parallel.lost_replica = "shrink"` batches are smaller while replicas are lost whole, and
    each begins with the row behind the last one that was read: no row is left out or read twice.

    Args:
        place: Place of this process.
        config: Configuration of `validate_resilient`, the same on all ranks.
        run_dir: Folder of the run, with its tokens.
        stream: Stream of the progress.
        dtype: Dtype of the parameters.
        timeouts: Time limits of the session; None for its own.
        host: Name of the machine that this process is lost with; None for `this_host`.
    """

    def __init__(
        self,
        place: RankPlace,
        config: Resolved,
        run_dir: Path,
        stream: TextIO,
        *,
        dtype: torch.dtype = torch.float32,
        timeouts: Timeouts | None = None,
        host: str | None = None,
    ) -> None:
        self._host = host or this_host()
        self.place, self.config, self.run_dir = place, config, run_dir
        self._dtype, self._timeouts = dtype, timeouts
        self.prepared = open_prepared(run_dir)
        train = config.train
        start = newest(run_dir)
        self._progress = Progress.resumed(start, train) if start else Progress()
        self._not_finite = NotFiniteSteps(train, run_dir)
        self._rows = SharedRows(run_dir, total_steps=train.steps, stream=stream)
        self._own_flops = own_flops(train, torch.device("cpu"))
        self._rank = place.rank
        self._current: tuple[int, Trainer] | None = None
        self._bits: float | None = None

    def go(self) -> Outcome | None:
        """Train until the last step, also when ranks die. Every rank of the job calls it.

        Returns:
            What has come of it; None on a spare rank that no place was free for, and on one that
            came back as the others were through.
        """
        parallel = self.config.parallel
        topology = Topology({"dp": parallel.dp, "cp": parallel.cp, "tp": parallel.tp})
        if self.place.rank not in topology.ranks:
            _log.warning("rank %d is spare: it waits to take the place of a rank", self.place.rank)
        try:
            return self._go(topology)
        except ClosedError:
            if self._current is not None:
                raise
            _log.warning("rank %d ends: the run has come to its end without it", self.place.rank)
            return None

    def _go(self, topology: Topology) -> Outcome:
        model, parallel = self.config.model, self.config.parallel
        copies = parallel.copies if parallel.data == "shard" else None
        with listen_for_interrupt() as interrupt, ExitStack() as held:
            saver = held.enter_context(GatheredSaver(self.run_dir, self.config, self.prepared))
            held.callback(self._rows.close)
            session = held.enter_context(
                Session(
                    self.place,
                    topology,
                    units_of_model(model, self.config.data.vocabulary),
                    self._build,
                    groups=lambda plan: group_specs(plan, ()),
                    is_spare=self.place.rank not in topology.ranks,
                    restore=self._restore,
                    at_end=lambda session: self._end(session, saver),
                    copies=copies,
                    host=self._host,
                    facts=self._facts(),
                    timeouts=self._timeouts,
                )
            )
            if session.rank != self.place.rank:
                _log.warning(
                    "rank %d, which was spare, has the place of rank %d",
                    self.place.rank,
                    session.rank,
                )
            for attempt in session.attempts(until=self.config.train.steps):
                with attempt as step:
                    self._step(session, step, saver, interrupt)
            done = session.step
        if self._rows.error is not None:
            # It has made all ranks stop, and this is the only one that knows why.
            raise self._rows.error
        is_interrupted = done < self.config.train.steps
        return Outcome(done, None if is_interrupted else self._bits, is_interrupted)

    # -- what the session asks for -------------------------------------------------------------

    def _build(self, plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
        # That of a spare is known when it has got a place.
        self._rank = rank
        named, replica = _named(plan, groups, rank), plan.place(rank).replica
        device = torch.device("cpu")
        form = plan.form(replica)
        model = build_model(self.config, named, device, dtype=self._dtype, form=form)
        kinds, parameters = ParameterKinds.of(model), model.named_parameters()
        return TrainState(model, make_optimizer(parameters, kinds, self.config.train))

    def _restore(self, plan: NtpPlan, model: nn.Module, optimizer: Optimizer) -> int:
        checkpoint = newest(self.run_dir)
        if checkpoint is None:
            return 0
        read_checkpoint(checkpoint, planned_shard_views(model, optimizer, plan, self._rank))
        set_optimizer_step(optimizer, checkpoint.step)
        if (rows := checkpoint.state().get("rows")) is not None:
            _note_rows(optimizer, checkpoint.step, rows, 0)
        return checkpoint.step

    def _facts(self) -> dict[str, str]:
        text = json.dumps(to_dict(self.config), sort_keys=True).encode()
        return {
            "configuration": hashlib.blake2b(text, digest_size=8).hexdigest(),
            "tokens": self.prepared.fingerprint,
        }

    # -- a step --------------------------------------------------------------------------------

    def _step(
        self, session: Session, attempt: Attempt, saver: GatheredSaver, interrupt: Interrupt
    ) -> None:
        """One attempt at a step, and what is due after it. Collective over the ranks in use."""
        trainer, train, index = self._trainer(session), self.config.train, session.step
        start = time.perf_counter()
        found = trainer.accumulate(index)
        asked = interrupt.is_requested or self._rows.error is not None
        agreed = trainer.agree(found, is_asked_to_stop=asked)
        loss = agreed.nats / trainer.batches.num_targets(index)
        if not agreed.is_finite:
            self._not_finite.record_not_finite(index + 1, loss, math.nan, None)
        rate = trainer.set_learning_rate(index)
        if agreed.wants_to_stop:
            session.request_stop()
        norm = attempt.finish(max_norm=None if train.clip_norm == "none" else train.clip_norm)
        if not norm.isfinite():
            # The same number on all ranks, none of which applies the step.
            self._not_finite.record_not_finite(index + 1, loss, float(norm), None)

        def row() -> dict[str, float]:
            elapsed_s = time.perf_counter() - start
            where = _where(session, trainer.batches.rows_per_batch)
            return {**trainer.row(index, agreed, norm, rate, elapsed_s), **where}

        self._rows.note(row())
        attempt.commit()
        self._write(session, row())
        done = index + 1
        if done == train.steps:
            return
        if is_due(self.config.checkpoint.every, done):
            saver.save(session, trainer, done)
        if is_due(train.eval_every, done):
            self._evaluate(session, trainer)
        if train.sample_every and is_due(train.sample_every, done):
            texts = continue_prompts(
                trainer.model, trainer.groups, self.config, self.prepared.tokenizer, session.plan
            )
            if self._rows.is_writer:
                session.check_fence()
                tell_samples(self.run_dir, done, texts)

    def _end(self, session: Session, saver: GatheredSaver) -> None:
        """Evaluate and save what the run has come to; again if a rank dies. Collective."""
        trainer, train = self._trainer(session), self.config.train
        # Evaluated before it is saved: a run that is whole has the row, and adds no other.
        if session.step == train.steps and train.eval_every != "none":
            self._evaluate(session, trainer)
        if session.step:
            saver.save(session, trainer, session.step)
            saver.wait()

    def _evaluate(self, session: Session, trainer: Trainer) -> None:
        start = time.perf_counter()
        bits = evaluate(
            trainer.model, trainer.groups, self.prepared.held_out, self.config, session.plan
        )
        if bits is not None:
            row = {"bits_per_byte": bits, "eval_s": time.perf_counter() - start}
            self._write(session, {"step": session.step, **row})
        self._bits = bits

    def _trainer(self, session: Session) -> Trainer:
        """The trainer of this generation; making one is collective over the ranks in use."""
        if self._current is not None and self._current[0] == session.generation:
            return self._current[1]
        plan, rank, model = session.plan, session.rank, session.model
        assert isinstance(model, LanguageModel)
        if self._current is None:
            _log.info("%s\n%s", model.describe(), describe_run(self.config, self.prepared))
        config = self._config_of(plan)
        batches = batches_of(config, self.prepared)
        # Where they begin is part of the optimizer's state, which moves to ranks that join.
        group, now = session.optimizer.param_groups[0], session.step
        whole = self.config.train.global_batch_tokens // self.config.train.sequence_length
        step, rows, more = group.get(_ROWS, (0, 0, whole))
        batches.go_on(now, rows + (now - step) * more)
        _note_rows(session.optimizer, now, batches.rows_before(now), batches.rows_per_batch)
        trainer = Trainer(
            model,
            _named(plan, session.groups, rank),
            config,
            batches,
            plan=plan,
            replicas=PlannedReplicas(model, session.sync, plan, rank),
            optimizer=session.optimizer,
            compares=False,
            peak_flops=self._own_flops * len(used_ranks(plan)),
        )
        trainer.rewarm = self._progress.rewarm
        self._current = session.generation, trainer
        self._become_writer(session, batches.rows_per_batch)
        return trainer

    def _config_of(self, plan: NtpPlan) -> Resolved:
        """The configuration with the batch of a generation. Local."""
        parallel, train = self.config.parallel, self.config.train
        if parallel.lost_replica == "absorb":
            return self.config
        # A multiple of the replicas, as was checked.
        tokens = train.global_batch_tokens // parallel.dp * replicas_left(plan)
        return replace(self.config, train=replace(train, global_batch_tokens=tokens))

    # -- metrics -------------------------------------------------------------------------------

    def _become_writer(self, session: Session, rows: int) -> None:
        """Take over the metrics where the rank that wrote them is gone. As `_trainer`.

        Steps whose state was lost are done again, so their rows are dropped.
        """
        world, rank = session.plan.topology.world_size, session.rank
        # The lowest one, of those that may have to add the row of the last step if there are any.
        order = rank if self._rows.noted_step == session.step else world + rank
        told = torch.tensor([-order])
        everyone = _named(session.plan, session.groups, rank)[ALL_RANKS].collectives
        is_writer = int(everyone.all_reduce(told, op="max")) == -order
        self._rows.enter(session.step, is_writer=is_writer)
        if is_writer and session.transitions:
            last = session.transitions[-1]
            _log.warning(
                "generation %d after step %d: %d ranks, tp %s, %d rows a step, in %.2f s (%s)",
                session.generation,
                session.step,
                len(session.ranks),
                "/".join(str(own[0]) for own in session.plan.degrees),
                rows,
                last.total_s,
                cause(session.transitions),
            )

    def _write(self, session: Session, row: dict[str, float]) -> None:
        if self._rows.is_writer:
            session.check_fence()
            self._rows.write(row)


def _named(plan: NtpPlan, groups: Groups, rank: int) -> Groups:
    return groups.relabelled(group_names(plan, rank, PLANNED_NAMES))


_ROWS = "rows_read"
"""Key of the optimizer's first group: a step, the rows read before it, and those of a step."""


def _note_rows(optimizer: Optimizer, step: int, rows: int, more: int) -> None:
    optimizer.param_groups[0][_ROWS] = [step, rows, more]


def _where(session: Session, rows: int) -> dict[str, float]:
    """Who took part in a step with so many rows, and when it was done."""
    degrees = {f"tp.{replica}": float(own[0]) for replica, own in enumerate(session.plan.degrees)}
    return {
        "wall_s": time.time(),
        "ranks": float(len(session.ranks)),
        "generation": float(session.generation),
        "replicas": float(replicas_left(session.plan)),
        "rows": float(rows),
        **degrees,
    }


def cause(transitions: Sequence[Transition]) -> str:
    """Which ranks died or joined in the newest transition, else what was noticed first."""
    last = transitions[-1]
    found = [f"rank {rank}: {reason}" for rank, reason in sorted(last.gone.items())]
    if len(transitions) > 1:
        # A process may take the place of one that has just died.
        stayed = set(transitions[-2].ranks).difference(last.gone)
        found += [f"rank {rank} joins" for rank in last.ranks if rank not in stayed]
    if last.generation and last.moved is None:
        found.append("some of the state was lost, so all have gone back to this step")
    return ", ".join(found) or last.reason or "the beginning"


class GatheredSaver:
    """Gathers the state on one rank of the canonical replica, which writes it alone.

    The gather goes through the session's groups, so that it ends when a rank dies; the files are
    written by one process, which waits for no other. That rank needs memory for a copy of the model
    and of both averages of AdamW.

    Args:
        run_dir: Folder of the run.
        config: The validated configuration.
        prepared: Tokens of the run.
    """

    def __init__(self, run_dir: Path, config: Resolved, prepared: Prepared) -> None:
        self._run_dir, self._config = run_dir, config
        self._identity = identity_of(config, prepared.fingerprint)
        self._saver = open_saver(config, run_dir, Group("alone", (0,), None))

    def save(self, session: Session, trainer: Trainer, step: int) -> None:
        """Write a checkpoint. Collective over the ranks in use.

        Args:
            session: The session; a rank that the others left behind writes nothing.
            trainer: The trainer of this generation.
            step: Number of steps that are done.
        """
        progress = Progress(step, 0, trainer.rewarm, trainer.batches.rows_before(step))
        plan, rank = session.plan, session.rank
        place = plan.place(rank)
        is_canonical = place.replica == plan.canonical_replica(place.stage)
        gathers = is_canonical and plan.topology.coordinates(rank)["cp"] == 0
        layouts, over = param_layouts_of(trainer.model), trainer.groups["tp"].collectives
        views: dict[str, ShardView] = {}
        for name, tensor in session.gather_state():
            if gathers:
                (own,) = shard_views(plan, rank, {name: tensor}, layouts).values()
                whole = _whole(own, over)
                if place.index == 0:
                    views[name] = whole
        if views:
            self._write(session, views, progress)
        # A rank that went on to the next generation would end the gather of the others.
        waiting = torch.zeros(1, device=trainer.model.device)
        trainer.groups[ALL_RANKS].collectives.all_reduce(waiting)

    def wait(self) -> None:
        """Until the checkpoint that this rank writes, if any, is whole. Local."""
        self._saver.wait()

    def _write(self, session: Session, views: dict[str, ShardView], progress: Progress) -> None:
        """Begin to write, unless the others have left this rank behind. Local."""
        self._saver.wait()
        last = newest(self._run_dir)
        # The rank that wrote before may have got this far before it died.
        if last is None or last.step < progress.step:
            session.check_fence()
            state = {"identity": self._identity, **progress.state(self._config.train)}
            self._saver.save(progress.step, views, state)

    def __enter__(self) -> GatheredSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._saver.__exit__(kind, *error)


def _whole(view: ShardView, collectives: Collectives) -> ShardView:
    """A view of the logical tensor. Collective over the tensor-parallel group."""
    tensor: Tensor = view.tensor
    layout, dim = view.param_layout.layout, view.param_layout.dim
    if layout is not None and layout.size > 1:
        gathered = collectives.all_gather(tensor.contiguous(), dim=dim, sizes=layout.sizes)
        tensor = join_shards(gathered.split(list(layout.sizes), dim), layout, dim=dim)
    return ShardView(tensor, ParamLayout(), 0)
