from pcomm.core.checkpoint.index import SafeReader as SafeReader
from pcomm.core.checkpoint.planners import ShardLoadPlanner as ShardLoadPlanner
from pcomm.core.checkpoint.planners import ShardSavePlanner as ShardSavePlanner
from pcomm.core.checkpoint.shard_view import FlatRange as FlatRange
from pcomm.core.checkpoint.shard_view import ShardView as ShardView
