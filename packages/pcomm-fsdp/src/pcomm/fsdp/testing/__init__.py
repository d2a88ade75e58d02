"""Small models and comparisons for tests of sharding, ours and those of users."""
