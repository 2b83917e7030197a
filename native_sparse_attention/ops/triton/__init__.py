"""The Triton backend: kernels as torch operators, with autograd."""
