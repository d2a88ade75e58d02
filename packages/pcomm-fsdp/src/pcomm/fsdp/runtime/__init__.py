"""A sharded model while it runs: hooks, the schedule, buffers and collectives."""
