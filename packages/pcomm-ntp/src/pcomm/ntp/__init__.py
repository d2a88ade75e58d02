"""Nonuniform tensor parallelism: which units each rank has after others have failed."""

from importlib.metadata import version

from pcomm.core.face import face

__version__ = version("pcomm-ntp")
__getattr__, __dir__, __all__ = face(__name__, __file__)
