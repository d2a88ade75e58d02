"""Checks of this machine for pcomm, each with a reason and a fix; see `examination.examine`."""
