"""Server reflection under both of its names: the package has v1alpha only (grpc/grpc#38576).

Owns the list of names that are shown. v1 is not on it: its descriptor is in no pool here, and listing it
would make clients fail.
"""

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from service import health_messages

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"


class _Pools:
    """The default descriptor pool, and health's own behind it."""

    def __init__(self) -> None:
        self._pools = (descriptor_pool.Default(), health_messages.POOL)

    def _find(self, method: str, *arguments: Any) -> Any:
        for pool in self._pools[:-1]:
            try:
                return getattr(pool, method)(*arguments)
            except KeyError:
                continue
        return getattr(self._pools[-1], method)(*arguments)

    def FindFileByName(self, name: str) -> Any:
        return self._find("FindFileByName", name)

    def FindFileContainingSymbol(self, name: str) -> Any:
        return self._find("FindFileContainingSymbol", name)

    def FindMessageTypeByName(self, name: str) -> Any:
        return self._find("FindMessageTypeByName", name)

    def FindExtensionByNumber(self, message: Any, number: int) -> Any:
        return self._find("FindExtensionByNumber", message, number)

    def FindAllExtensions(self, message: Any) -> Any:
        return self._pools[0].FindAllExtensions(message)


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Registers reflection of these services, of health and of itself."""
    servicer = ReflectionServicer([*services, health_messages.SERVICE, V1ALPHA], pool=_Pools())
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": handler}),)
    )
