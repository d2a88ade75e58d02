"""Explicit process groups, layouts, exchanges and collectives for PyTorch."""

from importlib.metadata import version

from pcomm.core.face import face

__version__ = version("pcomm-core")
__getattr__, __dir__, __all__ = face(__name__, __file__)
