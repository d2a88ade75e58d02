from pcomm.gdn_cp.layer_moves import Plan as Plan
from pcomm.gdn_cp.ops.transitions import MatrixTransition as MatrixTransition
from pcomm.gdn_cp.ops.transitions import ScalarTransition as ScalarTransition
from pcomm.gdn_cp.plan import make_plan as make_plan
from pcomm.gdn_cp.specs.attention import AttentionSpec as AttentionSpec
from pcomm.gdn_cp.specs.gated_delta_net import GdnSpec as GdnSpec
from pcomm.gdn_cp.specs.mamba2 import Mamba2Spec as Mamba2Spec
from pcomm.gdn_cp.specs.spec import Convolution as Convolution
from pcomm.gdn_cp.specs.spec import RecurrentState as RecurrentState
from pcomm.gdn_cp.specs.spec import Section as Section
from pcomm.gdn_cp.specs.spec import Spec as Spec
from pcomm.gdn_cp.strategies.cost import Link as Link
from pcomm.gdn_cp.strategies.head_share import HeadShare as HeadShare
from pcomm.gdn_cp.strategies.strategy import StrategyName as StrategyName

__version__: str
