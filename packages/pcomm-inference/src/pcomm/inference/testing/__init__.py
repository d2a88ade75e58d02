"""Models for tests of engines: small, exact, and with an oracle of their own."""
