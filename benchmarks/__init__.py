"""Measurements, run as `python -m benchmarks.<name>`; results land in benchmarks/results/."""
