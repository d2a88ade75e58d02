"""The four ways to split a mixer over ranks, one file each, and the choice between them."""
