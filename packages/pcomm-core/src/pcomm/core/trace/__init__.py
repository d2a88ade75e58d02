"""Communication and computation as events in time, and what follows from them."""
