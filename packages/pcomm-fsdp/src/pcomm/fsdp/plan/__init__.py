"""Decisions before a sharded model runs: units, flat layouts, one plan for each parameter group."""
