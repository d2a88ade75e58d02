"""Fully sharded data parallel whose gathers and reduces have communicators of their own."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.fsdp._fully_shard import fully_shard
    from pcomm.fsdp.analysis.report import Report
    from pcomm.fsdp.settings.policy import CommPolicy, Precision
    from pcomm.fsdp.settings.reshard_policy import ReshardPolicy
    from pcomm.fsdp.settings.roles import Roles, Scope
    from pcomm.fsdp.sharded import Sharded
    from pcomm.fsdp.state.checkpoint import (
        load_checkpoint,
        model_shard_views,
        optimizer_shard_views,
        save_checkpoint,
    )

__all__ = [
    "CommPolicy",
    "Precision",
    "Report",
    "ReshardPolicy",
    "Roles",
    "Scope",
    "Sharded",
    "fully_shard",
    "load_checkpoint",
    "model_shard_views",
    "optimizer_shard_views",
    "save_checkpoint",
]

__version__ = version("pcomm-fsdp")
__getattr__, __dir__ = face(
    __name__,
    {
        "CommPolicy": "settings.policy",
        "Precision": "settings.policy",
        "Report": "analysis.report",
        "ReshardPolicy": "settings.reshard_policy",
        "Roles": "settings.roles",
        "Scope": "settings.roles",
        "Sharded": "sharded",
        "fully_shard": "_fully_shard",
        "load_checkpoint": "state.checkpoint",
        "model_shard_views": "state.checkpoint",
        "optimizer_shard_views": "state.checkpoint",
        "save_checkpoint": "state.checkpoint",
    },
)
