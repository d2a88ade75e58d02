"""A model checker of protocols on symmetric memory: who may overwrite what, and when.

Plain Python, without torch. A protocol says which steps a CTA of a rank takes in an operation; the
checker runs sequences of operations on 2 or 3 ranks in every order that the barriers and polls of
the protocol allow, and answers with a counterexample or with none.
"""

from pcomm.core.face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
