"""Whether a file that is read again and again (credentials, certificates, peers) is still the same."""

from pathlib import Path

Stamp = tuple[int, int, int]
MISSING: Stamp = (0, 0, 0)


def file_stamp(path: Path) -> Stamp:
    """Changes with content and with rights: a secret that others may read from now on must be refused.

    So does a replaced file, and a symbolic link with a new target. MISSING where there is no such file.
    """
    try:
        status = path.stat()
    except OSError:
        return MISSING
    return (status.st_ino, status.st_size, status.st_ctime_ns)
