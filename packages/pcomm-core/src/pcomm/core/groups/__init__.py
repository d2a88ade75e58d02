"""Groups of ranks: their description, opening, communicators and closing (start at `groups.py`)."""
