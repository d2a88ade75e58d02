"""Layers split over a tensor-parallel group, which on one rank are plain torch functions."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
