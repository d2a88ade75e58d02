"""The Triton kernels, in the files of their operations in `collectives`; they import Triton."""
