"""Requests, the scheduler, the two pools and the step that runs a model."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
