"""Memory that is registered with communicators, each pair once, all of it or nothing."""
