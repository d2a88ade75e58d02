"""How far a step is from the limit of the machine's memory."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
