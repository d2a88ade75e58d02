"""Collective operations: one interface, and its implementations (start at `protocol.py`)."""

from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.core.collectives.adjoint import with_adjoint
    from pcomm.core.collectives.autograd import differentiable
    from pcomm.core.collectives.call import Call
    from pcomm.core.collectives.distributed import DistributedCollectives
    from pcomm.core.collectives.identity import IdentityCollectives
    from pcomm.core.collectives.instrumented import InstrumentedCollectives
    from pcomm.core.collectives.protocol import Collectives, Pending
    from pcomm.core.collectives.spy import SpyCollectives

__all__ = [
    "Call",
    "Collectives",
    "DistributedCollectives",
    "IdentityCollectives",
    "InstrumentedCollectives",
    "Pending",
    "SpyCollectives",
    "differentiable",
    "with_adjoint",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "Call": "call",
        "Collectives": "protocol",
        "DistributedCollectives": "distributed",
        "IdentityCollectives": "identity",
        "InstrumentedCollectives": "instrumented",
        "Pending": "protocol",
        "SpyCollectives": "spy",
        "differentiable": "autograd",
        "with_adjoint": "adjoint",
    },
)
