"""A model with its tokenizer and an engine: text from prompts and conversations, in Python."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
