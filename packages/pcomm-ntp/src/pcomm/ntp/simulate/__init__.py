"""Predictions of what failed GPUs cost a job, by policy; start at `placements.simulate`.

Pure Python and NumPy. Nothing here is measured: the numbers follow from counting GPUs.
"""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
