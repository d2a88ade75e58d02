"""Shards of logical tensors, written and read through torch.distributed.checkpoint."""

from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.core.checkpoint.planners import ShardLoadPlanner, ShardSavePlanner
    from pcomm.core.checkpoint.shard_view import FlatRange, ShardView

__all__ = ["FlatRange", "ShardLoadPlanner", "ShardSavePlanner", "ShardView"]

__getattr__, __dir__ = face(
    __name__,
    {
        "FlatRange": "shard_view",
        "ShardLoadPlanner": "planners",
        "ShardSavePlanner": "planners",
        "ShardView": "shard_view",
    },
)
