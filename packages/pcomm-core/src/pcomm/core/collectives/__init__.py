"""What a group can do with tensors, once as a protocol and then once per way of doing it."""
