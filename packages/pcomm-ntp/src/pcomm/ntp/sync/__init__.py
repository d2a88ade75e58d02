"""Sums of gradients over replicas of different degrees, and optimizers whose state has owners."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
