"""Parameters and optimizer state of a sharded model: initialisation, checkpoints, state dicts."""
