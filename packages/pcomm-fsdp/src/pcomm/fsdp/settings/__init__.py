"""What a caller of `fully_shard` chooses: roles, scopes, communication, precision, resharding."""
