"""Context parallelism for Gated DeltaNet, Mamba-2 and attention on packed sequences."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.gdn_cp.layer_moves import Plan
    from pcomm.gdn_cp.ops.transitions import MatrixTransition, ScalarTransition
    from pcomm.gdn_cp.plan import make_plan
    from pcomm.gdn_cp.specs.attention import AttentionSpec
    from pcomm.gdn_cp.specs.gated_delta_net import GdnSpec
    from pcomm.gdn_cp.specs.mamba2 import Mamba2Spec
    from pcomm.gdn_cp.specs.spec import Convolution, RecurrentState, Section, Spec
    from pcomm.gdn_cp.strategies.cost import Link
    from pcomm.gdn_cp.strategies.head_share import HeadShare
    from pcomm.gdn_cp.strategies.strategy import StrategyName

__all__ = [
    "AttentionSpec",
    "Convolution",
    "GdnSpec",
    "HeadShare",
    "Link",
    "Mamba2Spec",
    "MatrixTransition",
    "Plan",
    "RecurrentState",
    "ScalarTransition",
    "Section",
    "Spec",
    "StrategyName",
    "make_plan",
]

__version__ = version("pcomm-gdn-cp")
__getattr__, __dir__ = face(
    __name__,
    {
        "AttentionSpec": "specs.attention",
        "Convolution": "specs.spec",
        "GdnSpec": "specs.gated_delta_net",
        "HeadShare": "strategies.head_share",
        "Link": "strategies.cost",
        "Mamba2Spec": "specs.mamba2",
        "MatrixTransition": "ops.transitions",
        "Plan": "layer_moves",
        "RecurrentState": "specs.spec",
        "ScalarTransition": "ops.transitions",
        "Section": "specs.spec",
        "Spec": "specs.spec",
        "StrategyName": "strategies.strategy",
        "make_plan": "plan",
    },
)
