"""A job in a store that outlives its ranks: who enters, who is refused, and a whole restart."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch.distributed as dist

from pcomm.core.errors import ConfigError, FencedError
from pcomm.core.process import RankPlace
from pcomm.core.process.store_server import open_store
from pcomm.core.testing.programs import wait_until
from pcomm.ntp.job import JobAttempt, JobLimits, enter_job
from pcomm.ntp.job import attempts as job_module
from pcomm.ntp.session import StoreLostError, Timeouts
from pcomm.ntp.session.membership import Membership

FACTS = {"--out": "/shared/run", "train.steps": "9"}
# A heartbeat that stops is seen soon; nothing else is waited for.
LIMITS = JobLimits(silent_s=1.0, settled_s=3600.0, most_starts=3, longest_pause_s=0.05, look_s=0.02)
BEATING = Timeouts(heartbeat_s=0.02, dead_after_s=3600.0)


@pytest.fixture
def places() -> Iterator[Callable[[int], RankPlace]]:
    """Places of a job of three ranks, whose store is in this process."""
    server = open_store("127.0.0.1", 0)
    port = server.port
    yield lambda rank: RankPlace(rank, 3, "127.0.0.1", port)
    assert server.port == port


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which processes would have ended."""
    codes: list[int] = []
    watch = JobAttempt._watch

    def leave(code: int) -> None:
        codes.append(code)
        raise SystemExit

    def watch_until_its_end(job: JobAttempt, *stores: dist.Store) -> None:
        with contextlib.suppress(SystemExit):
            watch(job, *stores)

    monkeypatch.setattr(JobAttempt, "_watch", watch_until_its_end)
    monkeypatch.setattr(job_module.os, "_exit", leave)
    return codes


def counts_no_more(store: dist.Store) -> bool:
    return store.get("pcomm/job/short/0") == b"0"


def members(*places: RankPlace) -> list[Membership]:
    """Ranks in generation 0 of the session of their attempt, with heartbeats."""
    found = []
    for place in places:
        made = Membership(
            place.store, place.rank, range(3), {one: one for one in range(3)}, {}, BEATING
        )
        made.enter()
        found.append(made)
    return found


def test_processes_of_a_rank_are_counted_and_an_end_is_told_by_the_next(places, exits):
    with enter_job(places(1), FACTS, LIMITS) as first:
        assert first.enter() == places(1)
        assert not places(0).store().check(["pcomm/ended/1"])
        [member] = members(first.enter())
        with enter_job(places(1), FACTS, LIMITS) as second:
            assert second.enter() == replace(places(1), incarnation=1)
            store = places(0).store()
            assert store.get("pcomm/ended/1").decode().startswith("1 0 another process")
            assert not store.check(["pcomm/ended/2"])
            # The older of two that live at once is ended, whichever launcher has started it.
            wait_until(lambda: exits == [2], "the end of the older process")
        member.close()


def test_a_store_of_another_job_is_refused_and_changes_nothing(places):
    with enter_job(places(0), FACTS, LIMITS):
        other = {**FACTS, "train.steps": "8", "train.seed": "1"}
        with pytest.raises(ConfigError) as refused, enter_job(places(1), other, LIMITS):
            pytest.fail("it enters")
        assert "train.seed is 1 here and (nothing) there" in refused.value.found
        assert "train.steps is 8 here and 9 there" in refused.value.found
        assert "--out" not in refused.value.found
        assert places(1).store().add("pcomm/job/starts/1", 0) == 0
        with enter_job(places(1), FACTS, LIMITS) as job:
            assert job.number == 0


def test_starts_that_do_not_last_are_held_back_and_then_refused(places, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(job_module.time, "sleep", pauses.append)
    limits = replace(LIMITS, longest_pause_s=1.5)
    for _ in range(3):
        with enter_job(places(2), FACTS, limits):
            pass
    assert pauses == [1.0, 1.5]
    with pytest.raises(ConfigError, match="4 starts in a row, none of which lasted 3600 s"):
        enter_job(places(2), FACTS, limits).__enter__()
    with enter_job(places(1), FACTS, limits), enter_job(places(2), FACTS, limits):
        assert pauses == [1.0, 1.5]


def test_a_start_that_has_lasted_counts_no_more(places):
    limits = replace(LIMITS, settled_s=0.0)
    for _ in range(5):
        with enter_job(places(0), FACTS, limits):
            store = places(0).store()
            wait_until(partial(counts_no_more, store), "it to count no more")


def test_work_is_done_once_and_again_where_its_process_has_died(places, exits):
    began, results = threading.Event(), []

    def dies() -> str:
        began.set()
        raise KeyboardInterrupt

    with enter_job(places(0), FACTS, LIMITS) as one, enter_job(places(1), FACTS, LIMITS) as two:
        with pytest.raises(KeyboardInterrupt):
            one.once("tokens", dies)
        assert began.is_set()
        # Its heartbeat has stopped.
        assert two.once("tokens", lambda: "made") == "made"
        assert one.once("tokens", lambda: pytest.fail("twice")) == "made"
        slow, waiting = threading.Event(), threading.Event()

        def work() -> str:
            waiting.set()
            # Longer than its silence would be waited for.
            assert slow.wait(3600)
            return "late"

        worker = threading.Thread(target=lambda: results.append(one.once("slow", work)))
        worker.start()
        assert waiting.wait(3600)
        waits = threading.Thread(
            target=lambda: results.append(two.once("slow", lambda: "by another"))
        )
        waits.start()
        time.sleep(1.5 * LIMITS.silent_s)
        slow.set()
        worker.join()
        waits.join()
    assert results == ["late", "late"]
    assert exits == []


def test_an_error_of_the_work_is_that_of_all_who_wait_and_a_later_start_tries_again(
    places, monkeypatch
):
    waits = threading.Event()
    refused: list[BaseException] = []
    wait_for = JobAttempt._wait_for

    def tells(job: JobAttempt, key: str) -> str | None:
        waits.set()
        return wait_for(job, key)

    monkeypatch.setattr(JobAttempt, "_wait_for", tells)

    def fails() -> str:
        assert waits.wait(3600)
        raise ConfigError("data.path", found="no file", why="It is read.", fix="Give one.")

    def second() -> None:
        with enter_job(places(1), FACTS, LIMITS) as job:
            places(1).store().wait(["pcomm/once/text/0/who"])
            try:
                job.once("text", lambda: "made")
            except ConfigError as error:
                refused.append(error)

    thread = threading.Thread(target=second)
    with enter_job(places(0), FACTS, LIMITS) as job:
        thread.start()
        with pytest.raises(ConfigError, match=r"data\.path"):
            job.once("text", fails)
        thread.join()
        assert isinstance(refused[0], ConfigError)
        assert refused[0].found == "no file (on rank 0)"
        with enter_job(places(2), FACTS, LIMITS) as late:
            assert late.once("text", lambda: "made") == "made"


def test_a_job_all_of_whose_ranks_are_gone_begins_anew_and_those_that_wake_are_left(places, exits):
    with enter_job(places(0), FACTS, LIMITS) as zero, enter_job(places(1), FACTS, LIMITS) as one:
        old = members(zero.enter(), one.enter())
        # While one of them lives, who comes is of the same attempt.
        old[0].close()
        with enter_job(places(2), FACTS, LIMITS) as late:
            assert late.number == 0
        old[1].close()
        with enter_job(places(2), FACTS, LIMITS) as next_:
            assert next_.number == 1
            place = next_.enter()
            assert place.prefix
            [new] = members(place)
            # It is in generation 0, not one that asks to be taken in.
            assert new.number == 0
            with pytest.raises(FencedError, match="no rank had a heartbeat"):
                old[1].check_fence()
            wait_until(lambda: exits.count(75) == 2, "the ends of those that were left behind")
            new.close()
    assert set(exits) == {75}


def test_a_stop_is_followed_by_another_attempt_and_the_end_by_none(places):
    with enter_job(places(0), FACTS, LIMITS) as job:
        job.enter()
        assert job.stop()
        assert not job.stop()
    with enter_job(places(0), FACTS, LIMITS) as job:
        assert job.number == 1
        assert job.finished is None
        job.enter()
        assert job.finish("after step 9")
    with enter_job(places(1), FACTS, LIMITS) as job:
        assert job.finished == "after step 9"


def test_a_store_that_is_gone_is_told_as_such():
    server = open_store("127.0.0.1", 0)
    place = RankPlace(0, 1, "127.0.0.1", server.port)
    with enter_job(place, FACTS, LIMITS) as job:
        del server
        with pytest.raises(StoreLostError):
            job.enter()
    assert os.EX_TEMPFAIL == job_module.TRY_AGAIN == 75


def test_a_rank_that_waits_for_what_never_comes_outlives_its_store_by_a_limit(exits):
    server = open_store("127.0.0.1", 0)
    place = RankPlace(0, 1, "127.0.0.1", server.port)
    with enter_job(place, FACTS, LIMITS) as job:
        job.enter()
        del server
        wait_until(lambda: exits == [75], "its end")
    server = open_store("127.0.0.1", 0)
    place = RankPlace(0, 1, "127.0.0.1", server.port)
    with enter_job(place, FACTS, replace(LIMITS, silent_s=3600.0)):
        del server
    # One that ends by itself is left to it.
    assert exits == [75]
