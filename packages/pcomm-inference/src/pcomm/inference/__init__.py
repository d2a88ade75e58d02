"""An engine that continues many prompts at once, and the attention and sampling it needs."""

from importlib.metadata import version

from pcomm.core.face import face

__version__ = version("pcomm-inference")
__getattr__, __dir__, __all__ = face(__name__, __file__)
