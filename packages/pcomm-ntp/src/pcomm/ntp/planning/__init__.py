"""What a job with failed ranks does, decided from integers alone: no torch, no communication."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
