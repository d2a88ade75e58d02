"""Blocks of keys and values, slots of states, and the cache of prompts in them."""
