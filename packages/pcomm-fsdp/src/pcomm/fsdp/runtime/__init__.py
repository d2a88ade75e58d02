"""What happens while a sharded model runs: hooks, the schedule, buffers and collectives."""
