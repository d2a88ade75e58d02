from pcomm.core.trace.chrome import write_chrome_trace as write_chrome_trace
from pcomm.core.trace.event import Event as Event
from pcomm.core.trace.gathering import gather_events as gather_events
from pcomm.core.trace.ledgered import ledgered_groups as ledgered_groups
from pcomm.core.trace.overlap import exposed_communication_s as exposed_communication_s
from pcomm.core.trace.overlap import overlap_fraction as overlap_fraction
from pcomm.core.trace.recorder import Recorder as Recorder
from pcomm.core.trace.traced import traced_groups as traced_groups
