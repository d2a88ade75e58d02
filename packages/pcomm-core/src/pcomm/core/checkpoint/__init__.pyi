from pcomm.core.checkpoint.dcp import SafeReader as SafeReader
from pcomm.core.checkpoint.dcp import ShardLoadPlanner as ShardLoadPlanner
from pcomm.core.checkpoint.dcp import ShardSavePlanner as ShardSavePlanner
from pcomm.core.checkpoint.views import FlatRange as FlatRange
from pcomm.core.checkpoint.views import ShardView as ShardView
