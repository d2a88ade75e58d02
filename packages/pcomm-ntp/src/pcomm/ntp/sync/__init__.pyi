from pcomm.ntp.sync.grad_sync import GradSync as GradSync
from pcomm.ntp.sync.owned_optimizer import OwnedOptimizer as OwnedOptimizer
