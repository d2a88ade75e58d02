"""Triton kernels of the mixers, and what launches them; importing a module imports Triton."""
