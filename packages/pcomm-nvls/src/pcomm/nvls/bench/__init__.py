"""`pcomm bench nvls`: what the operations cost, on the host and on the devices at hand."""
