"""One step of the model: its tensors, and graphs that replay it."""
