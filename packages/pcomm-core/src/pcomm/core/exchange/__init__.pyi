from pcomm.core.exchange.exchange import Exchange as Exchange
from pcomm.core.exchange.exchange import SectionExchange as SectionExchange
from pcomm.core.exchange.fast import ColumnShards as ColumnShards
from pcomm.core.exchange.fast import Packing as Packing
from pcomm.core.exchange.fast import RowMoves as RowMoves
from pcomm.core.exchange.fast import TorchPacking as TorchPacking
from pcomm.core.exchange.positions import Permutation as Permutation
