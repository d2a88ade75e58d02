"""Context parallelism for Gated DeltaNet, Mamba-2 and attention on packed sequences."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.gdn_cp.plan import Plan, make_plan
    from pcomm.gdn_cp.specs import AttentionSpec, GdnSpec, Mamba2Spec, Section, Spec
    from pcomm.gdn_cp.strategies.head_share import HeadShare
    from pcomm.gdn_cp.strategies.strategy import StrategyName

__all__ = [
    "AttentionSpec",
    "GdnSpec",
    "HeadShare",
    "Mamba2Spec",
    "Plan",
    "Section",
    "Spec",
    "StrategyName",
    "make_plan",
]

__version__ = version("pcomm-gdn-cp")
__getattr__, __dir__ = face(
    __name__,
    {
        "AttentionSpec": "specs",
        "GdnSpec": "specs",
        "HeadShare": "strategies.head_share",
        "Mamba2Spec": "specs",
        "StrategyName": "strategies.strategy",
        "Plan": "plan",
        "Section": "specs",
        "Spec": "specs",
        "make_plan": "plan",
    },
)
