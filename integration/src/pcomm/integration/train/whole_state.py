"""Checkpoints of a run whose ranks may die: one rank writes whole tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pcomm.core import Collectives, Group
from pcomm.core.checkpoint import ShardView
from pcomm.core.tensor_parallel import ParamLayout, join_shards
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.checkpoint.identity import identity_of
from pcomm.integration.checkpoint.saver import Saver
from pcomm.integration.config_resolved import Resolved
from pcomm.integration.data.preparation import Prepared
from pcomm.integration.parallelize import ALL_RANKS
from pcomm.integration.train.progress import Progress
from pcomm.integration.train.trainer import Trainer
from pcomm.ntp import Session

__all__ = ["WholeStateSaver"]


class WholeStateSaver:
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
        options = config.checkpoint
        self._run_dir, self._config = run_dir, config
        self._identity = identity_of(config, prepared.fingerprint)
        self._saver = Saver(
            run_dir,
            Group("alone", (0,), None),
            keep=None if options.keep == "all" else options.keep,
            is_asynchronous=options.asynchronous,
        )

    def save(self, session: Session, trainer: Trainer, progress: Progress) -> None:
        """Write a checkpoint. Collective over the ranks in use.

        Args:
            session: The session; a rank that the others left behind writes nothing.
            trainer: The trainer of this generation.
            progress: State of the run after the step.
        """
        plan, rank = session.plan, session.rank
        place = plan.place(rank)
        is_canonical = place.replica == plan.canonical_replica(place.stage)
        if is_canonical and plan.topology.coordinates(rank)["cp"] == 0:
            over = trainer.groups["tp"].collectives
            whole = {name: _whole(view, over) for name, view in trainer.shard_views().items()}
            if place.index == 0:
                self._write(session, whole, progress)
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

    def __enter__(self) -> WholeStateSaver:
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
