"""Torch's functions around a sharded model: right, or an error that names the call to use."""
