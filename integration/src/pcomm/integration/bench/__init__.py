"""`pcomm bench serving`: models served beside transformers; start at `command`."""
