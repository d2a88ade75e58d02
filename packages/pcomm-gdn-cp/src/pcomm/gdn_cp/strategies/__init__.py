"""The four ways to split a mixer over ranks, and the choice between them."""
