"""Choices of a caller of `fully_shard`: roles, scopes, communication, precision, resharding."""
