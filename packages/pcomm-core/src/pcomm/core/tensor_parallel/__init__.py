"""Layers split over a tensor-parallel group, which on one rank are plain torch functions."""
