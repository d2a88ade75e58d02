"""Text to batches: sources, split, tokenizer, token cache, packed rows."""
