from pcomm.nvls.policy.choose import Choice as Choice
from pcomm.nvls.policy.choose import CollectiveRequest as CollectiveRequest
from pcomm.nvls.policy.table import Band as Band
from pcomm.nvls.policy.table import Table as Table
from pcomm.nvls.policy.table import Threshold as Threshold
