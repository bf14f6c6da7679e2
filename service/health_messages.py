"""grpc.health.v1 messages, described here: the package of the pinned release has no List.

Owns a descriptor pool of its own, so that it never meets another copy of health.proto in this process.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "grpc.health.v1.Health"
UNKNOWN, SERVING, NOT_SERVING, SERVICE_UNKNOWN = 0, 1, 2, 3

_OPTIONAL, _REPEATED = 1, 3
_STRING, _ENUM, _MESSAGE = 9, 14, 11


def _field(name: str, number: int, kind: Any, label: Any = _OPTIONAL, type_name: str = "") -> Any:
    return descriptor_pb2.FieldDescriptorProto(
        name=name,
        number=number,
        type=kind,
        label=label,
        type_name=type_name or None,
    )


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="grpc/health/v1/health.proto", package="grpc.health.v1", syntax="proto3"
    )
    file.message_type.add(name="HealthCheckRequest", field=[_field("service", 1, _STRING)])
    response = file.message_type.add(name="HealthCheckResponse")
    status = response.enum_type.add(name="ServingStatus")
    for number, name in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        status.value.add(name=name, number=number)
    response.field.append(
        _field("status", 1, _ENUM, type_name=".grpc.health.v1.HealthCheckResponse.ServingStatus")
    )
    file.message_type.add(name="HealthListRequest")
    listed = file.message_type.add(name="HealthListResponse")
    entry_name = ".grpc.health.v1.HealthListResponse.StatusesEntry"
    listed.field.append(_field("statuses", 1, _MESSAGE, _REPEATED, entry_name))
    entry = listed.nested_type.add(name="StatusesEntry", field=[_field("key", 1, _STRING)])
    entry.options.map_entry = True
    entry.field.append(_field("value", 2, _MESSAGE, type_name=".grpc.health.v1.HealthCheckResponse"))
    service = file.service.add(name="Health")
    for method, streaming in (("Check", False), ("List", False), ("Watch", True)):
        kind = "HealthList" if method == "List" else "HealthCheck"
        service.method.add(
            name=method,
            input_type=f".grpc.health.v1.{kind}Request",
            output_type=f".grpc.health.v1.{kind}Response",
            server_streaming=streaming,
        )
    return file


POOL = descriptor_pool.DescriptorPool()
POOL.Add(_file())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"grpc.health.v1.{name}"))


HealthCheckRequest = _message("HealthCheckRequest")
HealthCheckResponse = _message("HealthCheckResponse")
HealthListRequest = _message("HealthListRequest")
HealthListResponse = _message("HealthListResponse")
