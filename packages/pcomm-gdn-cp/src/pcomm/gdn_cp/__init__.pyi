from pcomm.gdn_cp.pack_offsets import PackOffsets as PackOffsets
from pcomm.gdn_cp.plan import Plan as Plan
from pcomm.gdn_cp.plan import make_plan as make_plan
from pcomm.gdn_cp.specs import AttentionSpec as AttentionSpec
from pcomm.gdn_cp.specs import Convolution as Convolution
from pcomm.gdn_cp.specs import GdnSpec as GdnSpec
from pcomm.gdn_cp.specs import Mamba2Spec as Mamba2Spec
from pcomm.gdn_cp.specs import MatrixTransition as MatrixTransition
from pcomm.gdn_cp.specs import RecurrentState as RecurrentState
from pcomm.gdn_cp.specs import ScalarTransition as ScalarTransition
from pcomm.gdn_cp.specs import Section as Section
from pcomm.gdn_cp.specs import Spec as Spec
from pcomm.gdn_cp.strategies.choice import Link as Link
from pcomm.gdn_cp.strategies.head_share import HeadShare as HeadShare
from pcomm.gdn_cp.strategies.strategy import StrategyName as StrategyName
from pcomm.gdn_cp.transformers.context_parallel import ContextParallel as ContextParallel
from pcomm.gdn_cp.transformers.context_parallel import context_parallel as context_parallel

__version__: str
