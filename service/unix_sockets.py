"""Socket files of listeners. gRPC replaces one that is there, whoever listens on it."""

import socket

PROBE_SECONDS = 1.0


def is_served(path: str) -> bool:
    """Whether somebody listens on the socket of this path; one that a dead server left is free."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(path)
        except (TimeoutError, BlockingIOError):
            return True  # so many wait to be accepted that there is no room
        except OSError:
            return False
        return True
