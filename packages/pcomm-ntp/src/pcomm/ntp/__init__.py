"""Nonuniform tensor parallelism: which units each rank has after others have failed."""

from pcomm.core.face import face, version_of

__version__ = version_of("pcomm-ntp")
__getattr__, __dir__, __all__ = face(__name__, __file__)
