"""A model with its tokenizer and an engine: text from prompts and conversations, in Python."""

from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.integration.llm.generation import Delta, Generation
    from pcomm.integration.llm.llm import LLM
    from pcomm.integration.llm.loading import LoadedModel, load_model
    from pcomm.integration.llm.memory_size import MemorySize

__all__ = ["LLM", "Delta", "Generation", "LoadedModel", "MemorySize", "load_model"]

__getattr__, __dir__ = face(
    __name__,
    {
        "LLM": "llm",
        "Delta": "generation",
        "Generation": "generation",
        "LoadedModel": "loading",
        "MemorySize": "memory_size",
        "load_model": "loading",
    },
)
