"""Schedules run in virtual time on a cluster that is only described; start at `engine.simulate`."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
