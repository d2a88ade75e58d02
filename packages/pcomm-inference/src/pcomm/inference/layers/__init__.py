"""Tensor-parallel layers for inference, without gradients."""
