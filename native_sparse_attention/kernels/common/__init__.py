"""Code that the kernels of several operations share."""
