"""An engine that continues many prompts at once, and the attention and sampling it needs."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.inference.attention.paged_attention import paged_attention
    from pcomm.inference.engine.engine import Engine
    from pcomm.inference.engine.request import Request, RequestOutput
    from pcomm.inference.engine.sampling_params import SamplingParams
    from pcomm.inference.memory import KVMemory, LayerMemory, StateMemory
    from pcomm.inference.model import KVSpec, LayerSpec, Model, StateSpec
    from pcomm.inference.step_batch import StepBatch
    from pcomm.inference.text.text_stream import TextStream
    from pcomm.inference.text.tokenizer import Tokenizer

__all__ = [
    "Engine",
    "KVMemory",
    "KVSpec",
    "LayerMemory",
    "LayerSpec",
    "Model",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "StateMemory",
    "StateSpec",
    "StepBatch",
    "TextStream",
    "Tokenizer",
    "paged_attention",
]

__version__ = version("pcomm-inference")
__getattr__, __dir__ = face(
    __name__,
    {
        "Engine": "engine.engine",
        "KVMemory": "memory",
        "KVSpec": "model",
        "LayerMemory": "memory",
        "LayerSpec": "model",
        "Model": "model",
        "Request": "engine.request",
        "RequestOutput": "engine.request",
        "SamplingParams": "engine.sampling_params",
        "StateMemory": "memory",
        "StateSpec": "model",
        "StepBatch": "step_batch",
        "TextStream": "text.text_stream",
        "Tokenizer": "text.tokenizer",
        "paged_attention": "attention.paged_attention",
    },
)
