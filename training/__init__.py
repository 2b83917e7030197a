"""What `train_enwik8.py` needs besides model and loop: options, data, files of a run, the plot."""
