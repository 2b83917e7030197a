"""The blocks that lists name: query by query (`gather.py`), those of neighbours together
(`unite.py`), or block by block (`pairs.py`), which takes the lists turned round (`inverse.py`)."""
