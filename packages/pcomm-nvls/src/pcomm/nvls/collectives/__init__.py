"""The operations as callers see them: checks, choice, launch or reference."""
