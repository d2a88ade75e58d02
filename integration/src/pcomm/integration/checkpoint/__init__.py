"""Saving a run so that it can go on, on the same ranks or on others."""
