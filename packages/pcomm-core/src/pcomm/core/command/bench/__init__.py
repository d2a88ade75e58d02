"""`pcomm bench`: finds the benchmarks of the installed packages; start at `command`."""
