"""Functions that a client offers: what requests say of them, and calls in the text of a model."""
