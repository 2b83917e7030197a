"""A step of decoding over a cache's storage in one launch: parts (`branches.py`, `ranking.py`), the
counters by which programs wait for one another (`arrivals.py`), and both forms: blocks read
once they are ranked (`step.py`), or before, where they are few (`ahead.py`)."""
