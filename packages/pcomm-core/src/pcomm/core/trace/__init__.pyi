from pcomm.core.trace.events import Event as Event
from pcomm.core.trace.events import exposed_communication_s as exposed_communication_s
from pcomm.core.trace.events import overlap_fraction as overlap_fraction
from pcomm.core.trace.events import write_chrome_trace as write_chrome_trace
from pcomm.core.trace.recording import Recorder as Recorder
from pcomm.core.trace.recording import gather_events as gather_events
from pcomm.core.trace.recording import traced_groups as traced_groups
