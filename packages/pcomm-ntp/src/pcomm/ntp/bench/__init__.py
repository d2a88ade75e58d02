"""`pcomm bench ntp`; start at `command`."""
