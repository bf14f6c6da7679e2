"""The channels of one client, blocking or with asyncio: opened when first needed, one for each service.

Owns channels and stubs. Knows no request: what is asked is in calls.py and watch.py.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.client.channel import CACHE_SERVICE_CONFIG, INFO_SERVICE_CONFIG, SERVICE_CONFIG, Target
from kvatlas.client.credentials import Credentials
from kvatlas.client.errors import Cancelled
from kvatlas.v1 import cache_pb2_grpc, generation_pb2_grpc, server_pb2_grpc


@dataclass(frozen=True, slots=True)
class Service:
    """A gRPC service, and the service config of the channel on which it is asked."""

    name: str
    stub: Callable[[Any], Any]
    config: Mapping[str, Any]


GENERATION = Service("generation", generation_pb2_grpc.GenerationServiceStub, SERVICE_CONFIG)
CACHE = Service("cache", cache_pb2_grpc.CacheServiceStub, CACHE_SERVICE_CONFIG)
SERVER = Service("server", server_pb2_grpc.ServerServiceStub, INFO_SERVICE_CONFIG)


class Connection:
    """Where calls of one client go. `grpc_module`: `grpc` or `grpc.aio`. Thread-safe."""

    def __init__(
        self, grpc_module: Any, address: str | Sequence[str], credentials: Credentials | None
    ) -> None:
        self._grpc = grpc_module
        self._target = Target(address, credentials)
        self._open: dict[str, tuple[Any, Any]] = {}  # by service: channel, stub
        self._life = 0
        self._lock = threading.Lock()  # of the two above

    @property
    def address(self) -> str:
        """As it was given; several are joined by commas."""
        return str(self._target)

    @property
    def life(self) -> int:
        """Another one after each close: what goes on over several calls ends with the one it began in."""
        return self._life

    def begin(
        self, service: Service, method: str, request: Any, timeout_seconds: float, life: int | None = None
    ) -> Any:
        """Begins a call: with asyncio its handle, otherwise the answer, or the iterator of a stream.

        Raises grpc.RpcError where it waits for the answer, CredentialsError, Cancelled where `life` is over.
        """
        call = getattr(self._stub(service, life), method)
        return call(request, timeout=timeout_seconds, metadata=self._target.metadata())

    def take_channels(self) -> list[Any]:
        """The open channels, for who closes them; the next call opens new ones."""
        with self._lock:
            opened, self._open = self._open, {}
            self._life += 1
        return [channel for channel, _ in opened.values()]

    def _stub(self, service: Service, life: int | None) -> Any:
        with self._lock:
            if life not in (None, self._life):
                raise client_closed()
            if service.name not in self._open:
                channel = self._target.open(self._grpc, service.config)
                self._open[service.name] = channel, service.stub(channel)
            return self._open[service.name][1]


def client_closed() -> Cancelled:
    """What a call is told whose client is closed meanwhile."""
    return Cancelled("the client was closed", code="CANCELLED")
