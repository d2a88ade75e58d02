"""Communication and computation as events in time: traces, overlap, and divergence of ranks."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
