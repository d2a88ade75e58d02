"""Checkpoints of a run whose ranks may die: one rank writes whole tensors."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from torch import Tensor

from pcomm.core import Collectives, Group
from pcomm.core.checkpoint import ShardView
from pcomm.core.tensor_parallel import ParamLayout, join_shards
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.checkpoint.identity import identity_of
from pcomm.integration.checkpoint.saver import Saver
from pcomm.integration.config_resolved import Resolved
from pcomm.integration.data.preparation import Prepared
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
        """Write a checkpoint. Collective over the ranks in use; those of other replicas return.

        Args:
            session: The session; a rank that the others left behind writes nothing.
            trainer: The trainer of this generation.
            progress: State of the run after the step.
        """
        place, coordinates = (
            session.plan.place(session.rank),
            session.plan.topology.coordinates(session.rank),
        )
        is_canonical = place.replica == session.plan.canonical_replica(place.stage)
        if not is_canonical or coordinates["cp"]:
            return
        over = trainer.groups["tp"].collectives
        whole = {name: _whole(view, over) for name, view in trainer.shard_views().items()}
        if place.index:
            return
        # The rank that wrote before may have got this far before it died.
        self._saver.wait()
        last = newest(self._run_dir)
        if last is not None and last.step >= progress.step:
            return
        session.check_fence()
        state = {"identity": self._identity, **progress.state(self._config.train)}
        self._saver.save(progress.step, whole, state)

    def __enter__(self) -> WholeStateSaver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._saver.__exit__(kind, error, traceback)


def _whole(view: ShardView, collectives: Collectives) -> ShardView:
    """A view of the logical tensor. Collective over the tensor-parallel group."""
    tensor: Tensor = view.tensor
    layout, dim = view.param_layout.layout, view.param_layout.dim
    if layout is not None and layout.size > 1:
        gathered = collectives.all_gather(tensor.contiguous(), dim=dim, sizes=layout.sizes)
        tensor = join_shards(gathered.split(list(layout.sizes), dim), layout, dim=dim)
    return ShardView(tensor, ParamLayout(), 0)
