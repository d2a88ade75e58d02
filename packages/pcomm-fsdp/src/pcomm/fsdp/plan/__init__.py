"""What is decided before a sharded model runs: units, flat layouts, one plan a parameter group."""
