"""Dense attention in plain PyTorch: chunked, block-masked, and written out as an oracle."""
