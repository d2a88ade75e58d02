"""Training: batches in, weights, checkpoints and metrics out."""
