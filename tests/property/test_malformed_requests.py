"""Requests that no client of ours would send: broken bytes, and whole messages with extreme values.

Every method of every service is called. Whatever arrives, the answer is one that the client can act on: never
INTERNAL, which would be a bug, never UNKNOWN, which would be Python's own text.
"""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvatlas.v1 import cache_pb2, generation_pb2, server_pb2
from service.testing import RunningService, running_service

CALLERS = 24
SEED = 20240607
TIMEOUT_SECONDS = 1.0
MAX_DEPTH = 5
MAX_READ = 5  # messages of a stream, then it is cancelled
FILES = (generation_pb2, cache_pb2, server_pb2)

NUMBERS = (0, 1, -1, 2, 16, 255, 1 << 16, (1 << 31) - 1, -(1 << 31), (1 << 32) - 1, (1 << 63) - 1, -(1 << 63))
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e30, -1e30, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "",
    "a",
    "\0",
    "toy",
    "worker-0",
    "ÿ",
    "\U0001f30a" * 20,
    "x" * 5000,
    "../../etc/passwd",
    "%s%n",
    "{{7*7}}",
)


def methods() -> list[tuple[str, Any, bool, type[Message]]]:
    """Path, method, whether it is the admin listener's, and the class of its request."""
    found = []
    for module in FILES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                is_admin = service.name == "AdminService"
                found.append((path, method, is_admin, GetMessageClass(method.input_type)))
    return found


def fill(message: Message, chance: random.Random, depth: int = 0) -> None:
    """Random fields with random, mostly extreme values."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.4 or (field.message_type and depth >= MAX_DEPTH):
            continue
        if field.message_type and field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is None:
                put_pair(getattr(message, field.name), field.message_type, chance)
        elif hasattr(getattr(message, field.name), "append"):
            for _ in range(chance.choice((1, 2, 20))):
                if field.message_type:
                    fill(getattr(message, field.name).add(), chance, depth + 1)
                else:
                    getattr(message, field.name).append(value(field, chance))
        elif field.message_type:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), chance, depth + 1)
        else:
            setattr(message, field.name, value(field, chance))


def put_pair(pairs: Any, entry: Any, chance: random.Random) -> None:
    key, kept = entry.fields_by_name["key"], entry.fields_by_name["value"]
    pairs[value(key, chance)] = value(kept, chance)


def value(field: FieldDescriptor, chance: random.Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return chance.choice(FLOATS)
        case FieldDescriptor.CPPTYPE_STRING:
            text = chance.choice(TEXTS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_ENUM:
            return chance.choice((0, 1, 2, 99, -1))
    low, high = {
        FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
        FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
        FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    }[field.cpp_type]
    return min(max(chance.choice(NUMBERS), low), high)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The bytes with a few of them flipped, cut out, doubled, put in or cut off."""
    changed = bytearray(data or b"\x0a\x02\x08\x01")
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                del changed[at : at + chance.choice((1, 4, 30))]
            case 2:
                changed[at:at] = changed[at : at + 20]
            case 3:
                changed[at:at] = chance.randbytes(chance.choice((1, 5, 40)))
            case _:
                del changed[at:]
    return bytes(changed)


def requests(num_requests: int, chance: random.Random) -> Iterator[tuple[str, Any, bool, bytes]]:
    known = methods()
    for number in range(num_requests):
        path, method, is_admin, kind = known[number % len(known)]
        message = kind()
        fill(message, chance)
        data = message.SerializeToString()
        yield path, method, is_admin, mutated(data, chance) if number % 2 else data


def code_of(channel: grpc.Channel, path: str, is_stream: bool, data: bytes) -> str:
    """Name of the status that ends the call."""
    try:
        if is_stream:
            call = channel.unary_stream(path)(data, timeout=TIMEOUT_SECONDS)
            for count, _ in enumerate(call):
                if count == MAX_READ:
                    call.cancel()
        else:
            channel.unary_unary(path)(data, timeout=TIMEOUT_SECONDS)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningService]:
    with running_service(tmp_path, admin_address="127.0.0.1:0", access_log=False) as started:
        yield started


@pytest.mark.parametrize("num_requests", [1_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_malformed_requests_break_nothing_and_leave_nothing(
    running: RunningService, wait_until: Any, num_requests: int
) -> None:
    codes: Counter[tuple[str, str]] = Counter()
    admin_address = f"127.0.0.1:{running.service.admin_port}"
    with (
        grpc.insecure_channel(running.address) as public,
        grpc.insecure_channel(admin_address) as admin,
        ThreadPoolExecutor(CALLERS) as callers,
    ):

        def call(request: tuple[str, Any, bool, bytes]) -> tuple[str, str]:
            path, method, is_admin, data = request
            return path, code_of(admin if is_admin else public, path, method.server_streaming, data)

        codes.update(callers.map(call, requests(num_requests, random.Random(SEED))))
        bugs = {name: count for name, count in codes.items() if name[1] in {"INTERNAL", "UNKNOWN"}}
        assert bugs == {}
        assert codes.total() == num_requests
        assert {path for path, _ in codes} == {path for path, *_ in methods()}
        seen = {code for _, code in codes}
        assert {"OK", "INVALID_ARGUMENT"} <= seen, "some pass, many are refused"
        wait_until(lambda: running.is_idle, "everything to be given back")
        spec = generation_pb2.GenerationSpec(text="abc", stop={"max_tokens": 3})
        fine = generation_pb2.GenerateRequest(spec=spec).SerializeToString()
        assert code_of(public, "/kvatlas.v1.GenerationService/Generate", False, fine) == "OK"
    assert threading.active_count() < 30
