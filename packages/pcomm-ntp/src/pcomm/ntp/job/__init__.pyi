from pcomm.ntp.job.attempts import TRY_AGAIN as TRY_AGAIN
from pcomm.ntp.job.attempts import JobAttempt as JobAttempt
from pcomm.ntp.job.attempts import JobLimits as JobLimits
from pcomm.ntp.job.attempts import enter_job as enter_job
