"""Tests on several ranks, comparisons with derived bounds; in the wheel."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
