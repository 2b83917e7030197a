"""Attention over ranges of keys: the compressed branch, the window, the forced blocks."""
