"""Compatibility with torch.compile, torch.export, torch.func and autocast."""
