"""What tests have ranks of a session do at the beginning of a step, and stores and checkpoints."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from core_bench.rated_network import RatedNetwork
from ntp_support.seen_training import Seen, state_of
from pcomm.core.process import RankPlace
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.session import Session

__all__ = [
    "die_at_the_end",
    "from_the_start",
    "hold_for",
    "hold_for_failure",
    "hold_for_joins",
    "hold_for_returns",
    "host_store",
    "raise_at",
    "save_state",
    "slow_down_at",
    "stop_with_a_newcomer",
]


def hold_for_joins(session: Session, place: RankPlace, *, counts: Mapping[int, int]) -> None:
    """Wait at the beginning of some steps until so many processes have asked to join, by step."""
    if session.step in counts:
        store, last = place.store(), f"pcomm/session/join/{counts[session.step]}"
        # Not their number, which is there before what they ask for.
        while not store.check([last]) and session.failure is None:
            time.sleep(0.005)


def hold_for_returns(
    session: Session, place: RankPlace, *, period: int, at: int, spare: int
) -> None:
    """Wait at the step `at` of each period until each rank that `struck` asks to join again.

    Args:
        session: The session.
        place: Place of this rank.
        period: Steps of a period.
        at: Step within it.
        spare: Number of requests of spares at the start, which are waited for, too.
    """
    if session.step % period == at or (spare and session.step == 0):
        store = place.store()
        while session.failure is None:
            if (number := spare + store.add("struck", 0)) == 0:
                return
            if store.check([f"pcomm/session/join/{number}"]):
                return
            time.sleep(0.005)


def hold_for_failure(session: Session, place: RankPlace, *, step: int) -> None:
    """Wait at the beginning of a step until the ranks leave; count those that wait as `held`."""
    if session.step == step and session.generation == 0:
        place.store().add("held", 1)
        while session.failure is None:
            time.sleep(0.005)


def hold_for(session: Session, place: RankPlace, *, key: str, step: int) -> None:
    """Wait at the beginning of a step until a key is there; count those that wait as `held`.

    Those that go on count as `released`, in the last call of theirs to this connection.
    """
    if session.step == step and session.generation == 0:
        store = place.store()
        store.add("held", 1)
        while not store.check([key]):
            time.sleep(0.005)
        store.add("released", 1)


def from_the_start(plan: NtpPlan, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore what a checkpoint of step 0 has: the values that the model was built with."""
    del plan, model, optimizer
    return 0


def die_at_the_end(session: Session, *, port: int, rank: int, count: int) -> None:
    """End the process of a rank once so many ranks have come to the end of the job; an `at_end`.

    Args:
        session: The session.
        port: Port on this host of a store.
        rank: Rank that dies.
        count: Number of ranks.
    """
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store.add("ended", 1)
    if session.rank == rank:
        while store.add("ended", 0) < count:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)


def host_store(port: Connection, network: RatedNetwork | None = None, number: int = 0) -> None:
    """Host a store until the process ends; sends its port.

    Args:
        port: Connection that the port is sent on.
        network: Network in whose namespace `number` the store is; None for the host's own.
        number: Number of that namespace.
    """
    with nullcontext() if network is None else network.inside(number):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    port.recv()


def raise_at(session: Session, place: RankPlace, *, step: int, rank: int) -> None:
    """Raise an error of the program's own on one rank."""
    if (session.step, place.rank) == (step, rank):
        raise ValueError("no such file")


def save_state(session: Session, *, folder: Path, dies: int | None = None) -> None:
    """Save the plan and what this rank has, named by its number; an `at_end`.

    Args:
        session: The session.
        folder: Folder of the files.
        dies: Rank that ends its process instead.
    """
    if session.rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    session.check_fence()
    state = state_of(session.model, session.optimizer)
    seen = Seen(states={session.step: (session.plan.to_json(), state)})
    torch.save(seen, folder / str(session.rank))


def slow_down_at(session: Session, place: RankPlace, *, step: int, rank: int, speed: float) -> None:
    """Give a rank another speed, once."""
    if (session.step, place.rank) == (step, rank) and session.generation == 0:
        session.set_speed(rank, speed)


def stop_with_a_newcomer(session: Session, place: RankPlace) -> None:
    """Ask to stop in the step at whose end a process is taken in."""
    if (session.step, session.generation) == (1, 1):
        hold_for_joins(session, place, counts={1: 1})
        if place.rank == 0:
            session.request_stop()
