"""Shards of logical tensors, written and read through torch.distributed.checkpoint."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
