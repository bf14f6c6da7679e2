"""Who runs next and with which pages. Plain Python: no tensors, no wire."""
