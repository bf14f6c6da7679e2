"""The services that talk to this worker, one session per Hello, and what each is owed.

Owns session numbers, message numbers and live counts. Knows nothing of sockets.
"""

from collections import OrderedDict
from dataclasses import dataclass

MAX_SERVICES = 256
MAX_KNOWN_EPOCHS = 4096
LASTING_HEARTBEATS = 6
"""Heartbeats with one and the same difference of live sequences after which it is a bug: 3 s."""


@dataclass(slots=True)
class Peer:
    """One session of one service: from its Hello to its loss, its Goodbye or its next Hello."""

    identity: bytes
    instance_id: str
    service_epoch: int
    session: int  # never used twice in the life of the worker
    last_heard: float
    number: int = 0  # of the last message to it
    live_sequences: int = 0
    odd_difference: int = 0
    odd_heartbeats: int = 0
    compared_step: int = -1  # the engine's last step when live sequences were compared

    @property
    def source(self) -> str:
        """Name by which the scheduler groups its sequences; not that of an earlier session."""
        return f"{self.instance_id}#{self.session}"

    def next_number(self) -> int:
        """The number of the message that is sent next."""
        self.number += 1
        return self.number

    def disagrees(self, believed: int) -> bool:
        """Whether its count of live sequences has differed from ours for so long that it is a bug."""
        difference = believed - self.live_sequences
        if difference == 0 or difference != self.odd_difference:
            self.odd_heartbeats = 0
        self.odd_difference = difference
        if difference:
            self.odd_heartbeats += 1
        return self.odd_heartbeats >= LASTING_HEARTBEATS


class Refused(Exception):
    """A Hello that is answered by Refusal; the text says why."""


class Peers:
    """Sessions by routing id and by source."""

    def __init__(self) -> None:
        self.by_identity: dict[bytes, Peer] = {}
        self.by_source: dict[str, Peer] = {}
        self._last_session = 0
        self._epochs: OrderedDict[str, int] = (
            OrderedDict()
        )  # newest service_epoch by instance, oldest out first

    def __len__(self) -> int:
        return len(self.by_identity)

    def open(
        self, identity: bytes, instance_id: str, service_epoch: int, now: float
    ) -> tuple[Peer, Peer | None]:
        """A new session, and the one it replaces. Raises Refused."""
        if not instance_id or identity != instance_id.encode():
            raise Refused(f"routing id {identity!r} is not the instance_id {instance_id!r}")
        if service_epoch < self._epochs.get(instance_id, 0):
            raise Refused(f"service_epoch {service_epoch} is older than the last one of {instance_id}")
        if identity not in self.by_identity and len(self.by_identity) >= MAX_SERVICES:
            raise Refused(f"{MAX_SERVICES} services are connected")
        replaced = self.close(identity)
        self._epochs[instance_id] = service_epoch
        self._epochs.move_to_end(instance_id)
        if len(self._epochs) > MAX_KNOWN_EPOCHS:
            self._epochs.popitem(last=False)
        self._last_session += 1
        peer = Peer(identity, instance_id, service_epoch, self._last_session, last_heard=now)
        self.by_identity[identity] = self.by_source[peer.source] = peer
        return peer, replaced

    def close(self, identity: bytes) -> Peer | None:
        """Forgets a session; what is still sent to its source finds nobody."""
        peer = self.by_identity.pop(identity, None)
        if peer is not None:
            del self.by_source[peer.source]
        return peer

    def silent(self, now: float, limit_seconds: float) -> list[Peer]:
        """Sessions without a sign of life for longer than the limit."""
        return [peer for peer in self.by_identity.values() if now - peer.last_heard > limit_seconds]
