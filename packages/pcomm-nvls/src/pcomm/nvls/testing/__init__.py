"""What tests of the kernels need on a machine without a GPU."""
