"""Weights of fewer bytes for decoding on a CPU: linear layers whose weights are int8."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
