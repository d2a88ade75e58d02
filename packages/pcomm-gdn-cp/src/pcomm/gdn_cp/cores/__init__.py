"""The mixers' mathematics on one process: packed sequences in, packed sequences out."""
