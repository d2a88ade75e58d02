"""Linear layers of a model that decodes: their weights in the form that the processor reads."""
