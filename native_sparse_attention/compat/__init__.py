"""What torch.compile, torch.export, torch.func and autocast ask of code."""
