"""From logits to one token for each request: settings, filters, grammars, draws."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
