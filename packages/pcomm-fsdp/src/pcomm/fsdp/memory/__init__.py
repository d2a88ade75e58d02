"""The buffers of a sharded model: used again within a step, and registered with communicators."""
