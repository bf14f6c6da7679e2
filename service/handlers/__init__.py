"""gRPC handlers: the edge where wire types stop."""
