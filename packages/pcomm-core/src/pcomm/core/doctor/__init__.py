"""What this machine can do for pcomm, and why not; start at `examination.examine`."""
