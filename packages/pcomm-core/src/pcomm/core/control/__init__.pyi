from pcomm.core.control.agreement import FailureFlag as FailureFlag
from pcomm.core.control.control import Control as Control
from pcomm.core.control.control import Vote as Vote
from pcomm.core.control.without_control import control_of_group as control_of_group
from pcomm.core.control.without_control import default_control as default_control
