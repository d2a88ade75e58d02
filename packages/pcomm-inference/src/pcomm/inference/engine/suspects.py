"""Finds the request for which a step of several has failed, by running each alone."""

from __future__ import annotations

from collections.abc import Mapping

from pcomm.inference.engine.live_request import LiveRequest
from pcomm.inference.engine.scheduler import Scheduler
from pcomm.inference.engine.step_plan import StepPlan

__all__ = ["MOST_FAILURES", "Suspects"]

MOST_FAILURES = 2
"""Steps of several requests that may fail with a request which succeeds alone, before it ends."""


class Suspects:
    """Requests of a step that failed, which run alone until they are past the tokens of that step.

    Args:
        scheduler: Plans steps of one request.
        live: Requests under way by name; a suspect that is none of them has ended.
    """

    def __init__(self, scheduler: Scheduler, live: Mapping[str, LiveRequest]) -> None:
        self._scheduler = scheduler
        self._live = live
        self._accused: list[LiveRequest] = []
        self._waiting: list[LiveRequest] = []

    def plan(self) -> StepPlan | None:
        """The next step of the first suspect; None once there is no suspect."""
        while self._waiting:
            live = self._waiting[0]
            is_under_way = self._live.get(live.request_id) is live
            if is_under_way and live.num_computed < live.alone_until:
                plan = self._scheduler.schedule_alone(live)
                if plan.chunks:
                    return plan
            del self._waiting[0]
        self._accused.clear()
        return None

    def accuse(self, plan: StepPlan) -> list[LiveRequest]:
        """Suspect the requests of a step of several that failed.

        Returns:
            Requests that failed too often together with others, and have to end.
        """
        for live in plan.decodes:
            live.alone_until = len(live.tokens)
        for chunk in plan.chunks:
            chunk.live.alone_until = chunk.stop
        requests = plan.requests
        for live in requests:
            live.num_failures += 1
        lost = [live for live in requests if live.num_failures > MOST_FAILURES]
        self._accused = [live for live in requests if live not in lost]
        self._waiting = self._accused.copy()
        return lost

    def acquit_others(self) -> None:
        """Forget the failures of those that were suspected together with one that failed alone."""
        for live in self._accused:
            live.num_failures = 0

    def clear(self) -> None:
        """Suspect none."""
        self._accused.clear()
        self._waiting.clear()
