"""Who may connect to this worker's tcp sockets: CURVE keys, checked before a byte of a message is read.

One thread answers libzmq's questions (ZAP, https://rfc.zeromq.org/spec/27/) and hears of handshakes that
failed: a peer without the right key costs a log line now and then and a count, never a message. The file of
peers is read again when it changes; a wrong one leaves the old one in force. An open connection goes on when
its key is taken out of the file.
"""

import logging
import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvatlas.file_stamp import file_stamp
from kvatlas.seam_keys import SeamFiles, SeamKeyError, read_key, read_peers
from worker.channels import Wakeup
from worker.log import log_event

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"kvatlas"
HANDSHAKE_MS = 5000  # libzmq's 30 s would let strangers hold descriptors for long
QUIET_SECONDS = 10.0  # between two log lines of one reason: a stranger may try ten times a second
UNKNOWN_KEY, HANDSHAKE = "unknown_key", "handshake"
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_OTHER_MECHANISM = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH

logger = logging.getLogger("worker.link")


class Doorkeeper:
    """The worker's key, and the services it knows. Made with files that are wrong it raises SeamKeyError."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        files: SeamFiles,
        *,
        on_failure: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._files = files
        self._on_failure = on_failure
        self._clock = clock
        self._key = read_key(files.key)
        self._stamp = file_stamp(files.peers)
        self._peers = read_peers(files.peers)
        self.refusals = {UNKNOWN_KEY: 0, HANDSHAKE: 0}
        self._last_logged = dict.fromkeys(self.refusals, -QUIET_SECONDS)
        self._wakeup = Wakeup()
        self._is_stopping = False
        self._monitors: list[zmq.Socket[bytes]] = []
        self._zap = context.socket(zmq.REP)
        self._zap.set(zmq.LINGER, 0)
        self._zap.bind(ZAP_ADDRESS)
        self._thread = threading.Thread(target=self._run, name="kvatlas-door", daemon=True)

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Asks for a key at a socket that is bound later. Before start()."""
        socket.curve_server = True
        socket.curve_secretkey = self._key.secret
        socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer of ours nobody is let in
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        place = f"inproc://door-{len(self._monitors)}"
        socket.monitor(place, _FAILURES)
        monitor = self._context.socket(zmq.PAIR)
        monitor.set(zmq.LINGER, 0)
        monitor.connect(place)
        self._monitors.append(monitor)

    def start(self) -> None:
        """Begins to answer; until then connections wait."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and its sockets; after the guarded ones. Idempotent."""
        self._is_stopping = True
        self._wakeup.notify()
        if self._thread.ident is not None:
            self._thread.join()
        for socket in (self._zap, *self._monitors):
            socket.close()
        self._wakeup.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.exception("event=doorkeeper_failed")
            self._on_failure()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        for socket in (self._zap, *self._monitors):
            poller.register(socket, zmq.POLLIN)
        while not self._is_stopping:
            for ready, _ in poller.poll():
                if ready is self._zap:
                    self._answer(self._zap.recv_multipart())
                elif isinstance(ready, zmq.Socket):
                    self._hear(ready)

    def _answer(self, frames: list[bytes]) -> None:
        """One question of libzmq: version, id, domain, address, routing id, mechanism, the key's 32 bytes."""
        version, number, _, address, _, mechanism, *credentials = frames
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
        name = self._known().get(key)
        if name is None:
            self._refuse(UNKNOWN_KEY, address=address.decode(errors="replace"), key=key.decode() or "none")
        code, text = (b"200", b"OK") if name is not None else (b"400", b"unknown key")
        self._zap.send_multipart([version, number, code, text, (name or "").encode(), b""])

    def _known(self) -> "dict[bytes, str]":
        """Names by key, of the file as it is now if it is right."""
        stamp = file_stamp(self._files.peers)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._peers = read_peers(self._files.peers)
                log_event(logger, logging.INFO, "seam_peers_read", peers=len(self._peers))
            except SeamKeyError as error:
                log_event(logger, logging.ERROR, "seam_peers_refused", kept="old", why=error)
        return dict(self._peers)

    def _hear(self, monitor: "zmq.Socket[bytes]") -> None:
        event = parse_monitor_message(monitor.recv_multipart())
        if event["event"] & _FAILURES:
            is_plain = event["value"] == _OTHER_MECHANISM
            why = "no CURVE" if is_plain else "a key that is not this worker's, or no ZeroMQ"
            self._refuse(HANDSHAKE, socket=event["endpoint"].decode(errors="replace"), why=why)

    def _refuse(self, reason: str, **about: str) -> None:
        self.refusals[reason] += 1
        now = self._clock()
        if now - self._last_logged[reason] >= QUIET_SECONDS:
            self._last_logged[reason] = now
            total = self.refusals[reason]
            log_event(logger, logging.WARNING, "seam_refused", reason=reason, total=total, **about)
