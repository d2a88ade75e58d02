"""Regions of logical tensors, written and read through torch.distributed.checkpoint."""
