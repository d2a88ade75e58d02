"""Text that follows a JSON schema or a regular expression, by the library llguidance."""
