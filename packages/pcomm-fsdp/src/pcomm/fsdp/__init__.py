"""Fully sharded data parallel whose gathers and reduces have communicators of their own."""

from importlib.metadata import version

from pcomm.core.face import face

__version__ = version("pcomm-fsdp")
__getattr__, __dir__, __all__ = face(__name__, __file__)
