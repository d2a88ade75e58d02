"""This process: its place in the job, its device, its environment variables, its logs."""

from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.core.process.local_ranks import LocalRanks, RankError, run_local
    from pcomm.core.process.logs import RankFilter
    from pcomm.core.process.world import World, connect

__all__ = ["LocalRanks", "RankError", "RankFilter", "World", "connect", "run_local"]

__getattr__, __dir__ = face(
    __name__,
    {
        "LocalRanks": "local_ranks",
        "RankError": "local_ranks",
        "RankFilter": "logs",
        "World": "world",
        "connect": "world",
        "run_local": "local_ranks",
    },
)
