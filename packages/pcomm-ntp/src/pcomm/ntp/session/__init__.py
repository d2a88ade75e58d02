"""Training that goes on when ranks die: evidence, agreement, recovery and growth; see `Session`."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
