"""Explicit process groups, layouts, exchanges and collectives for PyTorch."""

from pcomm.core.face import face, version_of

__version__ = version_of("pcomm-core")
__getattr__, __dir__, __all__ = face(__name__, __file__)
