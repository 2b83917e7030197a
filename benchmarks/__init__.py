"""What the library costs, against its peers: `python -m benchmarks`, or one of them at a time."""
