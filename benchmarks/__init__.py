"""What the library costs, against its peers: `python -m benchmarks.NAME`."""
