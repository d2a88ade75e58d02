"""From one layout of a tensor to another in one all-to-all, with its gradient."""
