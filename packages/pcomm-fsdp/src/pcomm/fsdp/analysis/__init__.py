"""Bytes, memory and limits of a sharded model: imported only when it is asked for."""
