"""Language models built from blocks whose mixer a pattern of letters chooses."""
