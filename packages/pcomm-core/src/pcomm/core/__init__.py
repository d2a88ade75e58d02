"""Explicit process groups, layouts, exchanges and collectives for PyTorch."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.core.collectives.identity import IdentityCollectives
    from pcomm.core.collectives.protocol import Collectives, Pending
    from pcomm.core.control.control import Control
    from pcomm.core.errors import PcommError
    from pcomm.core.exchange.exchange import Exchange
    from pcomm.core.groups.group import Group
    from pcomm.core.groups.groups import Groups, open_groups
    from pcomm.core.groups.options import CommOptions
    from pcomm.core.groups.spec import GroupSpec
    from pcomm.core.layout import Layout
    from pcomm.core.process.local_ranks import run_local
    from pcomm.core.process.world import connect
    from pcomm.core.topology import Topology

__all__ = [
    "Collectives",
    "CommOptions",
    "Control",
    "Exchange",
    "Group",
    "GroupSpec",
    "Groups",
    "IdentityCollectives",
    "Layout",
    "PcommError",
    "Pending",
    "Topology",
    "connect",
    "open_groups",
    "run_local",
]

__version__ = version("pcomm-core")
__getattr__, __dir__ = face(
    __name__,
    {
        "Collectives": "collectives.protocol",
        "CommOptions": "groups.options",
        "Control": "control.control",
        "Exchange": "exchange.exchange",
        "Group": "groups.group",
        "GroupSpec": "groups.spec",
        "Groups": "groups.groups",
        "IdentityCollectives": "collectives.identity",
        "Layout": "layout",
        "PcommError": "errors",
        "Pending": "collectives.protocol",
        "Topology": "topology",
        "connect": "process.world",
        "open_groups": "groups.groups",
        "run_local": "process.local_ranks",
    },
)
