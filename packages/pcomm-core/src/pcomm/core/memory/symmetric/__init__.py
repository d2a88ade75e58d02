"""Memory of every rank of a group that all of them read and write by address."""
