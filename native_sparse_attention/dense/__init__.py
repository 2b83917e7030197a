"""Dense attention in plain PyTorch: chunked, block-masked, and an explicit oracle."""
