"""An engine that continues many prompts at once, and the attention and sampling it needs."""

from pcomm.core.face import face, version_of

__version__ = version_of("pcomm-inference")
__getattr__, __dir__, __all__ = face(__name__, __file__)
