"""`pcomm bench gdn-cp`: what one layer's exchange costs in each form; start at `command`."""
