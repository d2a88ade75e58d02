"""Collectives of gloo groups between pairs of ranks: fewer bytes, both directions at once."""
