"""Schedules run in virtual time on a cluster that is only described; start at `engine.simulate`."""
