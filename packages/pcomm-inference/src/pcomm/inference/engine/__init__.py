"""The engine: requests, scheduling, memory, sampling; what programs around it name."""

from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.inference.engine.engine import Engine
    from pcomm.inference.engine.engine_stats import EngineStats, PoolUse
    from pcomm.inference.engine.request import FinishReason, Request, RequestOutput, TokenLogprobs
    from pcomm.inference.engine.request_queue import QueueFullError
    from pcomm.inference.engine.sampling_params import SamplingParams

__all__ = [
    "Engine",
    "EngineStats",
    "FinishReason",
    "PoolUse",
    "QueueFullError",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprobs",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "Engine": "engine",
        "EngineStats": "engine_stats",
        "FinishReason": "request",
        "PoolUse": "engine_stats",
        "QueueFullError": "request_queue",
        "Request": "request",
        "RequestOutput": "request",
        "SamplingParams": "sampling_params",
        "TokenLogprobs": "request",
    },
)
