"""Which blocks a query selects: scores by either importance (`scoring.py`), folded into a running
top n on chip (`topn.py`)."""
