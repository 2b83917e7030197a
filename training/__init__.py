"""What `train_enwik8.py` needs besides the training loop: data, the files of a run, the plot."""
