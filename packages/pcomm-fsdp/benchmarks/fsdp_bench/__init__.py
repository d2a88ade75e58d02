"""`pcomm bench fsdp`: sharded training over rate-limited links, next to torch FSDP2."""
