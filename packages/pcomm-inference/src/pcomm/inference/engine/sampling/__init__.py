"""The next token of each row: settings, noise, filters, log-probabilities, grammars, ends."""
