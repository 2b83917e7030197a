"""How a GPU computes it: Triton kernels. The only folder that imports triton."""
