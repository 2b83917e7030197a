"""Decode kernels: a few new tokens per sequence attend over a KV cache, in one kernel launch."""
