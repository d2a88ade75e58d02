"""The operations as callers see them, one file each: checks, choice, launch or reference."""
