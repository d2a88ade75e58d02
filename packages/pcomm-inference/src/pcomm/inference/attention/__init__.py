"""Attention over keys and values that lie in blocks, of many requests in one call."""
