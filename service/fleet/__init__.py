"""The workers: links to them, their pages, which one gets a request."""
