"""Language models trained and run on the pcomm packages."""

from importlib.metadata import version

from pcomm.core.face import face

__version__ = version("pcomm-integration")
__getattr__, __dir__, __all__ = face(__name__, __file__)
