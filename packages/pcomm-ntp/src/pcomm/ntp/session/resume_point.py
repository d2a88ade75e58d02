"""From which state a job goes on, decided from what each rank says of its own, by integers alone.

Two things of a rank change at a time that the others do not share: the number of steps that it has
applied, and the generation whose state it holds. Both change in the same two phases. A rank first
has all that the change needs, and says so to the others: its gradients are summed ("ready"), or its
shards of the new generation have arrived ("complete"). Only when *every* rank of the generation has
said so may one go over: apply the step, or drop the shards of the generation before.

A failure can strike while some ranks have gone over and others have not. Then the highest number
that any survivor has is the one that counts, since the others have all that they need to follow:
the rank that went over had heard that from each of them.

Where a step is computed by the owners of each range of units alone (`OwnedParams`), it has a third
part, which is not a phase: owners apply the step to what they own, and count it; then they send the
weights to the other ranks that hold them. Owners of a range apply the same step to the same sum, so
what they own is that after the last step on each of them, whatever else has happened:

| a death while | survivors have | what follows |
|---|---|---|
| gradients are summed, or before anyone is ready | the step before, all weights | it is repeated |
| ranks tell that they are ready | some applied it, some are `behind` | these apply what they own |
| owners send weights | applied on all that heard; some are `stale` | as below |
| the next step is computed by some | applied; a rank may still be `stale` | as below |

The weights of ranks that are `behind` or `stale` count where they own them. All others of theirs
come from a rank that has them all, or from any owner that is left. The moments come from an owner
in any case. Units none of whose owners are left are lost, but for weights that some rank has whole
where the optimizer has no state; then all ranks go back to the checkpoint. A rank that fails once
more while state moves has only read what it had, so the same words of it are true again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pcomm.core.errors import DivergenceError

__all__ = ["NONE", "RankState", "ResumePoint", "resume_point"]

NONE = -1
"""Generation of a state that is not there."""


@dataclass(frozen=True)
class RankState:
    """What a rank says of its state when it leaves a generation.

    Args:
        confirmed: Generation whose state this rank holds, known to be complete on all of its
            ranks; `NONE` before the first.
        complete: A later generation whose state is complete on this rank and may be so on all;
            `NONE` if there is none.
        applied: Number of steps in that state.
        is_ready: True if the gradients of the next step are summed here, and the other ranks may
            have been told so.
        is_whole: False if other ranks own weights, and this one has not got all that the last step
            changed.
    """

    confirmed: int = NONE
    complete: int = NONE
    applied: int = 0
    is_ready: bool = False
    is_whole: bool = True


@dataclass(frozen=True)
class ResumePoint:
    """The state from which all ranks go on.

    Args:
        generation: Generation of the state; `NONE` if no rank has any, and the job starts.
        applied: Number of steps in it.
        holders: Ranks that hold it, ascending.
        behind: Those that have one step still to apply, whose gradients they hold.
        stale: Those that have applied the last step, and may lack weights of other owners.
    """

    generation: int
    applied: int
    holders: tuple[int, ...]
    behind: tuple[int, ...]
    stale: tuple[int, ...] = ()

    def whole(self) -> tuple[int, ...]:
        """Holders whose weights are all those after the last step, where ranks own some."""
        return tuple(one for one in self.holders if one not in self.behind + self.stale)


def resume_point(states: Mapping[int, RankState]) -> ResumePoint:
    """The state from which the ranks that arrived go on. Local; equal states, equal result.

    Args:
        states: The word of each rank that takes part, by rank. A process without a state, such as
            one that joins, may be left out.

    Raises:
        DivergenceError: The states do not belong together, which is a mistake of this package.
    """
    generation = max((own.confirmed for own in states.values()), default=NONE)
    if generation == NONE:
        return ResumePoint(NONE, 0, (), ())
    holders = [r for r, own in states.items() if generation in (own.confirmed, own.complete)]
    applied = max(states[rank].applied for rank in holders)
    behind = [rank for rank in holders if states[rank].applied < applied]
    lost = [r for r, own in states.items() if r not in holders and own.confirmed != NONE]
    unready = [r for r in behind if states[r].applied < applied - 1 or not states[r].is_ready]
    _check(states, sorted(lost + unready))
    # One that holds a later state, which has arrived, has all weights of it.
    told = [r for r in holders if states[r].confirmed == generation]
    stale = sorted(r for r in told if not states[r].is_whole and r not in behind)
    return ResumePoint(
        generation, applied, tuple(sorted(holders)), tuple(sorted(behind)), tuple(stale)
    )


def _check(states: Mapping[int, RankState], strays: Iterable[int]) -> None:
    if stray := list(strays):
        raise DivergenceError(
            "Session: the state to go on from",
            found=f"rank {stray[0]} with {states[stray[0]]}, of {dict(states)}",
            why="A rank goes over to a new state only when all ranks have said that they can.",
            fix="Start the job again from its last checkpoint, and report this.",
        )
