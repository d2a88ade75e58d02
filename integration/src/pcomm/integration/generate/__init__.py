"""Text from a trained run."""
