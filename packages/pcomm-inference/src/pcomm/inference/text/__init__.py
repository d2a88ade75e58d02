"""Tokens to text while they are written."""
