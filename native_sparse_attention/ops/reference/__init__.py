"""The specification in eager PyTorch, and the same in memory linear in the length."""
