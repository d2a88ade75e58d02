"""From one layout of a tensor to another in one collective, with its gradient."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
