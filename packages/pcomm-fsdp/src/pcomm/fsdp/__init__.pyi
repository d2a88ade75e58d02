from pcomm.fsdp._fully_shard import fully_shard as fully_shard
from pcomm.fsdp.checkpoint import load_checkpoint as load_checkpoint
from pcomm.fsdp.checkpoint import model_shard_views as model_shard_views
from pcomm.fsdp.checkpoint import optimizer_shard_views as optimizer_shard_views
from pcomm.fsdp.checkpoint import save_checkpoint as save_checkpoint
from pcomm.fsdp.fsdp2_communicators import Fsdp2Communicators as Fsdp2Communicators
from pcomm.fsdp.fsdp2_communicators import separate_communicators as separate_communicators
from pcomm.fsdp.report import Report as Report
from pcomm.fsdp.settings import CommPolicy as CommPolicy
from pcomm.fsdp.settings import Precision as Precision
from pcomm.fsdp.settings import ReshardPolicy as ReshardPolicy
from pcomm.fsdp.settings import Roles as Roles
from pcomm.fsdp.settings import Scope as Scope
from pcomm.fsdp.sharded import Sharded as Sharded

__version__: str
