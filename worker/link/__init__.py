"""The worker's sockets: the seam to services, the page feed, metrics over HTTP."""
