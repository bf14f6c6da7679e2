"""How a command ends: one line on stderr, and a code that a script can tell apart."""

import errno
import os
import sys
from typing import Final, TextIO

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NO_SERVER: Final = 3
DEADLINE: Final = 4
REFUSED: Final = 5
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141


NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Of an output that goes to a file."""


class CommandFailed(Exception):
    """A command cannot go on; the text is for the user."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def complain(message: str) -> None:
    """One line on stderr, whatever the message holds; where it cannot be written the code still tells."""
    try:
        print("kvatlas: " + " ".join(message.split()), file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr)


def drop(stream: TextIO) -> None:
    """What of it could not be written: Python would try once more at exit, and end with a code of its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def code_of(error: Exception) -> int | None:
    """Exit code of an error that is meant for the user; None: a bug of ours."""
    from kvatlas.cli.config import ConfigError

    if isinstance(error, ConfigError):
        return USAGE
    if isinstance(error, CommandFailed):
        return error.code
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return FAILED
    return _client_code(error) if "kvatlas.client.errors" in sys.modules else None


def _client_code(error: Exception) -> int | None:
    from kvatlas.client import errors
    from kvatlas.client.credentials import CredentialsError

    table: list[tuple[type[Exception], int]] = [
        (CredentialsError, USAGE),
        (errors.RequestError, USAGE),
        (errors.InvalidRequest, USAGE),
        (errors.NotFound, USAGE),
        (errors.Unavailable, NO_SERVER),
        (errors.DeadlineExceeded, DEADLINE),
        (errors.Refused, REFUSED),
        (errors.PermissionDenied, REFUSED),
        (errors.KvatlasError, FAILED),
    ]
    return next((code for kind, code in table if isinstance(error, kind)), None)
