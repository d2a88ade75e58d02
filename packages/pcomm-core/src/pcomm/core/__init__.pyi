from pcomm.core.collectives.identity import IdentityCollectives as IdentityCollectives
from pcomm.core.collectives.protocol import Collectives as Collectives
from pcomm.core.collectives.protocol import Pending as Pending
from pcomm.core.control.control import Control as Control
from pcomm.core.errors import PcommError as PcommError
from pcomm.core.exchange.exchange import Exchange as Exchange
from pcomm.core.groups.group import Group as Group
from pcomm.core.groups.open_groups import Groups as Groups
from pcomm.core.groups.open_groups import open_groups as open_groups
from pcomm.core.groups.spec import CommOptions as CommOptions
from pcomm.core.groups.spec import GroupSpec as GroupSpec
from pcomm.core.layout import Layout as Layout
from pcomm.core.process.local_ranks import run_local as run_local
from pcomm.core.process.world import connect as connect
from pcomm.core.topology import Topology as Topology

__version__: str
