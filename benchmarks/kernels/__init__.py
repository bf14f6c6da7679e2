"""One benchmark per kernel: bytes, time and percent of the limit."""
