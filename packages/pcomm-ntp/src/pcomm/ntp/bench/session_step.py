"""Steps of a job that could lose ranks at any time: those of a `Session`, where none is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.groups.groups import Groups
from pcomm.core.topology import Topology
from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.planning.units import Units
from pcomm.ntp.session import Built, Session

__all__ = ["SessionSteps", "SharedStore"]

_FOREVER = 10**9


class SharedStore:
    """A store of all ranks of torch.distributed, on rank 0. Collective to make.

    Groups of one process have names by their store, so a session beside other groups shares theirs.
    """

    def __init__(self) -> None:
        self._host: dist.TCPStore | None = None
        port = torch.zeros(1, dtype=torch.int64)
        if dist.get_rank() == 0:
            self._host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port += self._host.port
        dist.broadcast(port, 0)
        self._port = int(port)

    def connect(self) -> dist.Store:
        """A new connection. Local."""
        return dist.TCPStore("127.0.0.1", self._port, is_master=False)


class SessionSteps:
    """A session whose steps are taken one by one. Collective to make and to close.

    Args:
        store: Store of the job.
        topology: Axes and sizes of the job: all ranks of torch.distributed.
        units: Units of the model's parameters.
        build: Function of a plan, its groups and the rank that makes model and optimizer.
    """

    def __init__(
        self,
        store: SharedStore,
        topology: Topology,
        units: Mapping[str, Units],
        build: Callable[[Plan, Groups, int], Built],
    ) -> None:
        self._session = Session(store.connect, topology, units, build, rank=dist.get_rank())
        self._attempts = self._session.attempts(until=_FOREVER)

    def step(self, loss: Callable[[torch.nn.Module], Tensor], weight: float) -> None:
        """Train one step: backward, sums, the norm, the agreement, and the optimizer. Collective.

        Args:
            loss: Function of the model.
            weight: Factor of this rank's gradients in the sum.
        """
        with next(self._attempts) as attempt:
            attempt.backward(loss(self._session.model), weight=weight)
            attempt.commit()

    def close(self) -> None:
        """Wait for all ranks, and end the session. Collective."""
        self._session.close()
