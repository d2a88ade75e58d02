"""The choice of an algorithm: from facts that all ranks share and a table, by a pure function."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
