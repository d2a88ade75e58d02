"""Groups of a plan between threads, and gradients that tell where they belong."""
