"""Whole models of transformers, unchanged, over context-parallel ranks."""
