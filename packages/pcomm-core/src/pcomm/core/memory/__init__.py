"""Memory that communicators know of: registered pools, and memory that ranks share by address."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
