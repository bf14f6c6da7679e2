"""What `reason=` a failed start tells."""

import errno
import socket

import pytest

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.settings import ConfigError
from kvatlas.start_failures import start_reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModelError(ModelErrorReason.FILE_TRUNCATED, "the file ends early"), "FILE_TRUNCATED"),
        (ConfigError("page_size: 0"), "INVALID_SETTING"),
        (OSError(errno.EADDRINUSE, "in use"), "EADDRINUSE"),
        (PermissionError(errno.EACCES, "no"), "EACCES"),
        (socket.gaierror(socket.EAI_NONAME, "no such name"), "START_FAILED"),
        (OSError("no number"), "START_FAILED"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "invalid start byte"), "START_FAILED"),
    ],
)
def test_a_failed_start_has_a_reason_for_programs(error: Exception, reason: str) -> None:
    assert start_reason(error) == reason
