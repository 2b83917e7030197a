"""Native Sparse Attention (arXiv 2502.11089) for PyTorch."""
