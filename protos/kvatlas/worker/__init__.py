"""Private messages between service and worker."""
