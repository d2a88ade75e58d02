"""For tests of training: runs of a few steps, and text that is easy to learn."""
