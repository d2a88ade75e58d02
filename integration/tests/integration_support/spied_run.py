"""A rank of a resilient run that notes what a step of it sends, and what it keeps."""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from pcomm.core import Group, Groups
from pcomm.core.collectives import Collectives, SpyCollectives
from pcomm.core.process import RankPlace
from pcomm.integration.config.rules import validate_resilient
from pcomm.integration.config.sections import Config
from pcomm.integration.train.interrupt import Interrupt
from pcomm.integration.train.resilient import GatheredSaver, ResilientRun
from pcomm.ntp import Session
from pcomm.ntp.session import Attempt, generation

__all__ = ["SpiedStep", "spied_rank"]


class SpiedStep(NamedTuple):
    """What a rank has sent and kept in the second step of a run."""

    sent: dict[str, int]
    """Least bytes, by the key of the group."""

    weights: int
    """Bytes of the parameters."""

    optimizer: int
    """Bytes of the optimizer's state, and of what it keeps of parameters beside these."""

    save_sent: dict[str, int]
    """Least bytes that a save sends, by the key of the group."""


def spied_rank(place: RankPlace, config: Config, run_dir: Path) -> SpiedStep:
    """One rank of a resilient run; a task of `ResilientRanks`.

    Args:
        place: Place of this process.
        config: The configuration, of two steps and a checkpoint at the end.
        run_dir: Folder of the run, with its tokens.
    """
    resolved = validate_resilient(config, place.size)
    run = _SpiedRun(place, resolved, run_dir, io.StringIO(), host=str(place.rank))
    opened = generation._opened

    def spied(*args: object) -> Groups:
        return opened(*args).with_collectives(run.spy)  # type: ignore[arg-type]

    with patch.object(generation, "_opened", spied):
        run.go()
    assert run.step is not None
    return run.step._replace(save_sent=run.sent())


class _SpiedRun(ResilientRun):
    step: SpiedStep | None = None

    def spy(self, group: Group) -> Collectives:
        """Count what a group sends."""
        if group.is_identity:
            return group.collectives
        found = self._spies[group.key] = SpyCollectives(group.collectives)
        return found

    @property
    def _spies(self) -> dict[str, SpyCollectives]:
        found: dict[str, SpyCollectives] = self.__dict__.setdefault("spies", {})
        return found

    def sent(self) -> dict[str, int]:
        """What was sent since it was cleared."""
        return {key: spy.sent_bytes for key, spy in self._spies.items()}

    def _step(
        self, session: Session, attempt: Attempt, saver: GatheredSaver, interrupt: Interrupt
    ) -> None:
        self._clear()
        super()._step(session, attempt, saver, interrupt)
        weights = {p.untyped_storage()._cdata: p.nbytes for p in session.model.parameters()}
        optimizer = session.optimizer
        kept = [s for state in optimizer.state.values() for s in state.values()]
        kept += [p for group in optimizer.param_groups for p in group["params"]]
        others = {
            one.untyped_storage()._cdata: one.untyped_storage().nbytes()
            for one in kept
            if one.untyped_storage()._cdata not in weights
        }
        self.step = SpiedStep(self.sent(), sum(weights.values()), sum(others.values()), {})

    def _end(self, session: Session, saver: GatheredSaver) -> None:
        self._clear()
        super()._end(session, saver)

    def _clear(self) -> None:
        for spy in self._spies.values():
            spy.clear()
