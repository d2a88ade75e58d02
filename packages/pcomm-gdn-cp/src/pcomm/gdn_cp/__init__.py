"""Context parallelism for Gated DeltaNet, Mamba-2 and attention on packed sequences."""

from importlib.metadata import version

from pcomm.core.face import face

__version__ = version("pcomm-gdn-cp")
__getattr__, __dir__, __all__ = face(__name__, __file__)
