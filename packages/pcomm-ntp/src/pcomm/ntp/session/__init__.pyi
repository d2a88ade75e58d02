from pcomm.ntp.session.attempt import Attempt as Attempt
from pcomm.ntp.session.meeting import Patience as Patience
from pcomm.ntp.session.session import Session as Session
from pcomm.ntp.session.store_errors import StoreLostError as StoreLostError
from pcomm.ntp.session.training_state import Built as Built
from pcomm.ntp.session.transition import Transition as Transition
