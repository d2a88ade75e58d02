"""Attention of many requests over keys and values in blocks."""
