"""The specification in eager PyTorch, dense and in memory linear in the length."""
