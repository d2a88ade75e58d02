"""Directories of Hugging Face models: read, written, and started from."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
