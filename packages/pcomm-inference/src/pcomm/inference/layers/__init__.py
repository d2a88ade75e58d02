"""Layers of a model that decodes: weights in the form that the processor reads, and attention."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
