"""The worker: integers, pages and the device. Knows no text and no gRPC."""
