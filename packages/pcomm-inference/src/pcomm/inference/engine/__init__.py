"""Requests, the scheduler, the two pools and the step that runs a model."""
