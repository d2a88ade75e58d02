"""The choice of an algorithm: a pure function of facts that all ranks share, and its text."""
