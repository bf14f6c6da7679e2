"""Other engines on the same workloads, on the same machine, in the same run: `python -m benchmarks.peers`."""
