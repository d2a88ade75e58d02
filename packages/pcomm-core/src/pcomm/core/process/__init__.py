"""This process: its place in the job, its device, its environment variables, its logs."""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
