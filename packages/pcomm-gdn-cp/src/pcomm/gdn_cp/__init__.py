"""Context parallelism for Gated DeltaNet, Mamba-2 and attention on packed sequences."""

from pcomm.core.face import face, version_of

__version__ = version_of("pcomm-gdn-cp")
__getattr__, __dir__, __all__ = face(__name__, __file__)
