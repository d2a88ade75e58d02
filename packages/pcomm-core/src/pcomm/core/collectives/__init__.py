"""Collective operations: one interface, and its implementations (start at `protocol.py`)."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
