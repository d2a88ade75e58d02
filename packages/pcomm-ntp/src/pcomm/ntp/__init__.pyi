from pcomm.ntp.planning.cost import Cost as Cost
from pcomm.ntp.planning.degrees import Policy as Policy
from pcomm.ntp.planning.failures import Coord as Coord
from pcomm.ntp.planning.failures import Failures as Failures
from pcomm.ntp.planning.plan import NtpPlan as NtpPlan
from pcomm.ntp.planning.plan import Place as Place
from pcomm.ntp.planning.plan import plan as plan
from pcomm.ntp.planning.units import Units as Units
from pcomm.ntp.redistribute.planned_moves import StateLostError as StateLostError
from pcomm.ntp.session.records import StoreLostError as StoreLostError
from pcomm.ntp.session.session import Session as Session
from pcomm.ntp.session.training_state import TrainState as TrainState
from pcomm.ntp.sync.grad_groups import grad_groups as grad_groups
from pcomm.ntp.sync.grad_sync import GradSync as GradSync
from pcomm.ntp.transformers.nonuniform import nonuniform as nonuniform
from pcomm.ntp.transformers.tp_plan import units_of as units_of
from pcomm.ntp.transformers.whole_state import load_whole_state_dict as load_whole_state_dict
from pcomm.ntp.transformers.whole_state import whole_state_dict as whole_state_dict

__version__: str
