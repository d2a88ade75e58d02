"""The HTTP face of an engine: OpenAI's requests and answers, metrics, health and a page."""
