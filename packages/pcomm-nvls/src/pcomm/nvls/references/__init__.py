"""Each operation made of torch operations and core's collectives: the fallback and the oracle."""
