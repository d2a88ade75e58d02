"""Gradients of replicas with different degrees, summed during backward."""
