"""The control plane: how ranks agree, who they are, and which generation of them counts."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
