from pcomm.fsdp._fully_shard import fully_shard as fully_shard
from pcomm.fsdp.analysis.report import Report as Report
from pcomm.fsdp.settings.policy import CommPolicy as CommPolicy
from pcomm.fsdp.settings.policy import Precision as Precision
from pcomm.fsdp.settings.reshard_policy import ReshardPolicy as ReshardPolicy
from pcomm.fsdp.settings.roles import Roles as Roles
from pcomm.fsdp.settings.roles import Scope as Scope
from pcomm.fsdp.sharded import Sharded as Sharded
from pcomm.fsdp.state.checkpoint import load_checkpoint as load_checkpoint
from pcomm.fsdp.state.checkpoint import model_shard_views as model_shard_views
from pcomm.fsdp.state.checkpoint import optimizer_shard_views as optimizer_shard_views
from pcomm.fsdp.state.checkpoint import save_checkpoint as save_checkpoint

__version__: str
