"""What a run reports while it trains: rows of numbers, and the sinks that they go to."""
