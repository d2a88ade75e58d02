from pcomm.ntp.planning.survival import Survival as Survival
