"""Requests, the scheduler, the two pools and the step that runs a model."""

from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.inference.engine.engine_stats import EngineStats, PoolUse
    from pcomm.inference.engine.request import FinishReason, TokenLogprobs
    from pcomm.inference.engine.request_queue import QueueFullError

__all__ = ["EngineStats", "FinishReason", "PoolUse", "QueueFullError", "TokenLogprobs"]

__getattr__, __dir__ = face(
    __name__,
    {
        "EngineStats": "engine_stats",
        "FinishReason": "request",
        "PoolUse": "engine_stats",
        "QueueFullError": "request_queue",
        "TokenLogprobs": "request",
    },
)
