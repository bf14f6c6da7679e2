"""This service's end of encrypted seams: its key, the workers' keys, and why a connection failed.

Owns the choice of key: a worker is tried with each of the known ones in turn, since an address says nothing
of a key (`dns://` names stand for many workers), and two are known while one replaces the other. Files
are read again for every attempt; wrong ones leave the old ones in force.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from kvatlas.seam_keys import SeamFiles, SeamKeyError

KEY, HANDSHAKE = "key", "handshake"
QUIET_SECONDS = 10.0  # between two log lines about one worker: it is tried again for ever
MAX_MESSAGE_BYTES = 64 << 20  # libzmq alone sets no limit; workers' messages stay below 17 MiB
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
EVENTS = zmq.EVENT_DISCONNECTED | _REFUSED | _FAILED
"""What a link's monitor wants to hear."""

log = logging.getLogger("service.link")


class SeamKeys:
    """The keys of a process. Raises SeamKeyError when made with files that are wrong."""

    def __init__(self, files: SeamFiles) -> None:
        self._files = files
        self._pair, self._workers = files.read()
        self._last_fault = ""

    def read(self) -> tuple[Any, tuple[bytes, ...]]:
        """Own pair and the workers' public keys, as the files are now."""
        try:
            self._pair, self._workers = self._files.read()
            self._last_fault = ""
        except SeamKeyError as error:
            if str(error) != self._last_fault:
                self._last_fault = str(error)
                log.error('event=seam_keys_refused kept=old why="%s"', error)
        return self._pair, tuple(self._workers)


class SeamClient:
    """Encrypts the sockets of one link, if there are keys and it is a tcp link."""

    def __init__(
        self,
        address: str,
        keys: SeamKeys | None,
        clock: Callable[[], float],
        on_failure: Callable[[str], None],
    ) -> None:
        self._address = address
        self._keys = keys if address.startswith("tcp://") else None
        self._clock = clock
        self._on_failure = on_failure
        self._turn = 0  # which of the workers' keys is tried
        self._last_logged = -QUIET_SECONDS

    def prepare(self, socket: "zmq.Socket[bytes]") -> None:
        """Before it connects."""
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if self._keys is None:
            return
        pair, workers = self._keys.read()
        socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
        socket.curve_serverkey = workers[self._turn % len(workers)]

    def hear(self, event: Mapping[str, Any]) -> str:
        """Why the connection is over, as its monitor tells; "" while it is not."""
        if event["event"] == zmq.EVENT_DISCONNECTED:
            return "closed the connection"
        if event["event"] == _REFUSED:
            return self._fail(KEY, "it does not know this service's key")
        if event["event"] & _FAILED:
            why = "its key is not the one that was tried" if self._keys else "it may want CURVE: seam_key"
            return self._fail(HANDSHAKE, why)
        return ""

    def _fail(self, reason: str, why: str) -> str:
        self._turn += 1
        self._on_failure(reason)
        if self._clock() - self._last_logged >= QUIET_SECONDS:
            self._last_logged = self._clock()
            log.error('event=seam_handshake_failed address=%s reason=%s why="%s"', self._address, reason, why)
        return f"handshake failed: {why}"
