"""Recorded traffic: rebuild the pool as it was, or run it again under other settings. No live worker here."""
