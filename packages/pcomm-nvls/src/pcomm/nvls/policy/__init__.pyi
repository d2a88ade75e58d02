from pcomm.nvls.policy.bands import Band as Band
from pcomm.nvls.policy.bands import Row as Row
from pcomm.nvls.policy.choose import Choice as Choice
from pcomm.nvls.policy.facts import Question as Question
from pcomm.nvls.policy.table import Table as Table
