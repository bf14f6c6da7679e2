"""Where a model comes from: names to files on this disk. No tensors, no torch."""
