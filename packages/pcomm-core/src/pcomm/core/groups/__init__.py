"""Process groups with roles: described, opened together, shared where equal, and closed."""
