"""Who owns which page. Plain Python: no tensors, no requests, no wire."""
