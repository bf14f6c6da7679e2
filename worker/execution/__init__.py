"""The device step: a decision in, sampled tokens out."""
