"""Collectives of gloo groups between pairs of ranks: fewer bytes, and both directions at once."""
