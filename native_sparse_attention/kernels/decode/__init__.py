"""A step of decoding over a cache's storage in one launch: parts (`branches.py`, `ranking.py`), the
counters by which programs wait for one another (`grid_barrier.py`), and both forms: blocks read
once they are ranked (`persistent.py`), or before, where they are few (`read_all.py`)."""
