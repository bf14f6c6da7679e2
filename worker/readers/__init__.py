"""Folds of the page event stream, off the engine thread. They hold no pool."""
