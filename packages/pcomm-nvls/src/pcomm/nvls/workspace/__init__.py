"""The symmetric memory that the operations of a group share, and how they take turns in it."""
