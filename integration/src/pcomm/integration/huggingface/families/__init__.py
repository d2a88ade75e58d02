"""One table a family of models: their fields and our keys, their tensors and ours."""
