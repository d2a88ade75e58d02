from pcomm.ntp.planning.cost import Cost as Cost
from pcomm.ntp.planning.failures import Coord as Coord
from pcomm.ntp.planning.failures import Failures as Failures
from pcomm.ntp.planning.place import Place as Place
from pcomm.ntp.planning.plan import Plan as Plan
from pcomm.ntp.planning.plan import plan as plan
from pcomm.ntp.planning.policy import Policy as Policy
from pcomm.ntp.planning.units import Units as Units

__version__: str
