"""`pcomm bench inference`: what a step costs beside what it must do; start at `command`."""
