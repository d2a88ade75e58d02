"""From one layout of a tensor to another in one collective, with its gradient."""

from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.core.exchange.exchange import Exchange
    from pcomm.core.exchange.index import Permutation
    from pcomm.core.exchange.packing import ColumnShards, Packing, TorchPacking
    from pcomm.core.exchange.rows import RowMoves
    from pcomm.core.exchange.sections import SectionExchange

__all__ = [
    "ColumnShards",
    "Exchange",
    "Packing",
    "Permutation",
    "RowMoves",
    "SectionExchange",
    "TorchPacking",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "ColumnShards": "packing",
        "Exchange": "exchange",
        "Packing": "packing",
        "Permutation": "index",
        "RowMoves": "rows",
        "SectionExchange": "sections",
        "TorchPacking": "packing",
    },
)
