"""Rows of a run: what they hold, where they go, and pictures of them."""
