"""How a rank leaves a session: with all others at the end of the job, or alone with an error."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from pcomm.core.errors import FencedError
from pcomm.ntp.reshard import StateLostError
from pcomm.ntp.session import store_errors
from pcomm.ntp.session.headline import headline
from pcomm.ntp.session.membership import Membership
from pcomm.ntp.session.recovery import Recovery

__all__ = ["end_together", "leave_alone"]


def end_together(recovery: Recovery, membership: Membership, at_end: Callable[[], object]) -> None:
    """Wait until all ranks have come to the end of the job. Collective.

    Args:
        recovery: State of this rank, which helps the others when one dies.
        membership: This process as a member of the job.
        at_end: Function called before, and again in each generation that begins meanwhile.

    Raises:
        StateLostError: Steps are lost with ranks that died, and no step is attempted any more.
        PeerTimeoutError: Ranks did not come in time.
    """
    applied = recovery.applied
    with store_errors.told():
        while not membership.is_over:
            reason = _failure_of(at_end, recovery)
            if reason is None and membership.finish(recovery.applied):
                return
            recovery.move(reason or membership.watch.failure() or "other ranks have met")
            if recovery.applied < applied:
                raise StateLostError(
                    "Session.close",
                    found=f"step {recovery.applied}, to which the state was restored",
                    why=f"{applied} steps were applied, the last of them are lost with ranks that "
                    "died, and a program that closes its session attempts none again.",
                    fix="Start the job again from its last checkpoint.",
                )


def leave_alone(error: BaseException, recovery: Recovery, membership: Membership) -> None:
    """End this rank, and tell the others unless they know. Local."""
    if not isinstance(error, FencedError | store_errors.StoreLostError):
        try:
            membership.leave(f"{type(error).__name__}: {headline(error)}")
        except dist.DistError as lost:
            error.add_note(f"the store was not told: {lost}")
    recovery.abandon()
    membership.close()


def _failure_of(at_end: Callable[[], object], recovery: Recovery) -> str | None:
    """Do what the program does at the end; the reason to meet for if another rank failed."""
    try:
        at_end()
    except Exception as error:
        reason = recovery.setback(error)
        if reason is None:
            raise
        return reason
    return None
