"""Fully sharded data parallel whose gathers and reduces have communicators of their own."""

from pcomm.core.face import face, version_of

__version__ = version_of("pcomm-fsdp")
__getattr__, __dir__, __all__ = face(__name__, __file__)
