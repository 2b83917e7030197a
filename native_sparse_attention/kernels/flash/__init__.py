"""Attention over KV ranges: the compressed branch, the window, the forced blocks."""
