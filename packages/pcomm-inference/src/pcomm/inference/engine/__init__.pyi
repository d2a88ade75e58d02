from pcomm.inference.engine.request import FinishReason as FinishReason
from pcomm.inference.engine.request import QueueFullError as QueueFullError
from pcomm.inference.engine.stats import EngineStats as EngineStats
from pcomm.inference.engine.stats import PoolUse as PoolUse
