"""The state space of Mamba-2 over packed sequences: by chunks, token by token, and as a summary."""
