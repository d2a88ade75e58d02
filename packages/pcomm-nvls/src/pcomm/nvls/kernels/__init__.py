"""The Triton kernels, one file an algorithm. Importing one of them imports Triton."""
