"""The selected branch: attention to the blocks that block indices name."""
