"""The gated delta rule over packed sequences: by chunks, token by token, and as a summary."""
