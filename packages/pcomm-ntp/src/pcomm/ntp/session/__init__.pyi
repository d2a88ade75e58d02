from pcomm.ntp.session.generation import Transition as Transition
from pcomm.ntp.session.quorum import Timeouts as Timeouts
from pcomm.ntp.session.records import StoreLostError as StoreLostError
from pcomm.ntp.session.session import Session as Session
from pcomm.ntp.session.step import Attempt as Attempt
from pcomm.ntp.session.training_state import TrainState as TrainState
