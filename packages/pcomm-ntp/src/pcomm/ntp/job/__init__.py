"""A job in a store that outlives its ranks, which any launcher has started."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
