"""Language models trained and run on the pcomm packages."""

from pcomm.core.face import face, version_of

__version__ = version_of("pcomm-integration")
__getattr__, __dir__, __all__ = face(__name__, __file__)
