"""State moves from one plan to another; start at `planned_moves`, which is pure."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
