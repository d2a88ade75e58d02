"""Guesses of the next tokens, and what becomes of them."""
