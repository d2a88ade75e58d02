from pcomm.core.control.agreement import agree_on_lines as agree_on_lines
from pcomm.core.control.agreement import fail_together as fail_together
from pcomm.core.control.control import Control as Control
from pcomm.core.control.default import control_of_group as control_of_group
from pcomm.core.control.default import default_control as default_control
from pcomm.core.control.failure_flag import FailureFlag as FailureFlag
from pcomm.core.control.votes import Vote as Vote
