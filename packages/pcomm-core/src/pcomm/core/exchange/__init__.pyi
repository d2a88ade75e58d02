from pcomm.core.exchange.exchange import Exchange as Exchange
from pcomm.core.exchange.index import Permutation as Permutation
from pcomm.core.exchange.packing import ColumnShards as ColumnShards
from pcomm.core.exchange.packing import Packing as Packing
from pcomm.core.exchange.packing import TorchPacking as TorchPacking
from pcomm.core.exchange.rows import RowMoves as RowMoves
from pcomm.core.exchange.sections import SectionExchange as SectionExchange
