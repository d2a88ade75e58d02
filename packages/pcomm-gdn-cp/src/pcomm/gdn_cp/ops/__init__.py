"""The mixers' mathematics on one process: packed sequences in, packed sequences out."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
