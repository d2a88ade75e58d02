"""Mixtures of experts: routing, one exchange each way, and the experts' products."""
