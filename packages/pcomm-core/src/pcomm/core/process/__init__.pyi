from pcomm.core.process.local_ranks import LocalRanks as LocalRanks
from pcomm.core.process.local_ranks import RankError as RankError
from pcomm.core.process.local_ranks import run_local as run_local
from pcomm.core.process.logs import RankFilter as RankFilter
from pcomm.core.process.world import World as World
from pcomm.core.process.world import connect as connect
