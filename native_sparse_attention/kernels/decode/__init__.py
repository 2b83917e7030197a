"""Decode kernels: a few new tokens per sequence attend over a KV cache, in one kernel launch.

`persistent.py` ranks the KV blocks first and reads the selected ones. `read_all.py` reads every
block of a short cache while it ranks them. `step.py` is what both share. `kv_cache.py` writes new
tokens to the cache.
"""
