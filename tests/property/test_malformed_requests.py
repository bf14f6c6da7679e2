"""Requests that no client of ours would send: broken bytes, and whole messages with extreme values.

Every method of every service is called. Whatever arrives, the answer is one that the client can act on: never
INTERNAL, which would be a bug, never UNKNOWN, which would be Python's own text.
"""

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvatlas.v1 import cache_pb2, generation_pb2, server_pb2
from service.testing import RunningService, running_service
from service.testing_damage import fill, mutated
from service.testing_worker import WorkerScript

CALLERS = 24
SEED = 20240607
NUM_DRAINS = 40
START_DRAIN, STOP_DRAIN = "/kvatlas.v1.AdminService/StartDrain", "/kvatlas.v1.AdminService/StopDrain"
METADATA = (
    *("authorization", "traceparent", "tracestate", "x-request-id", "grpc-previous-rpc-attempts"),
    *("grpc-status-details-bin", "x-anything-bin", "user-agent-of-mine"),
)
WORDS = (
    "Bearer ",
    "-1",
    "99999999999999999999",
    "00-" + "0" * 32 + "-" + "f" * 16 + "-01",
    "1e9",
    "NaN",
    "\\",
    "%s",
)
TIMEOUT_SECONDS = 1.0
MAX_READ = 5  # messages of a stream, then it is cancelled
FILES = (generation_pb2, cache_pb2, server_pb2)


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


def requests(num_requests: int, chance: random.Random) -> Iterator[tuple[str, Any, bool, bytes]]:
    """For all methods in turn; those that end the service's work come last."""
    known = [each for each in methods() if each[0] != START_DRAIN]
    for number in range(num_requests):
        path, method, is_admin, kind = known[number % len(known)]
        message = kind()
        fill(message, chance)
        data = message.SerializeToString()
        yield path, method, is_admin, mutated(data, chance) if number % 2 else data


def drains(num_requests: int, chance: random.Random) -> Iterator[bytes]:
    for number in range(num_requests):
        message = server_pb2.StartDrainRequest()
        fill(message, chance)
        data = message.SerializeToString()
        yield mutated(data, chance) if number % 2 else data


def metadata(chance: random.Random) -> list[tuple[str, Any]]:
    """Some of what we read from metadata and some that we do not, with values that nobody means."""
    names = chance.sample(METADATA, chance.choice((0, 0, 1, 3)))
    return [
        (name, chance.randbytes(chance.choice((0, 3, 900))))
        if name.endswith("-bin")
        else (name, word(chance))
        for name in names
    ]


def word(chance: random.Random) -> str:
    """Printable, as the protocol asks; that is all it asks."""
    if chance.random() < 0.3:
        return chance.choice(WORDS)
    return (
        "".join(chr(chance.randrange(32, 127)) for _ in range(chance.choice((1, 5, 60, 2000)))).strip() or "x"
    )


def code_of(
    channel: grpc.Channel, path: str, is_stream: bool, data: bytes, headers: Sequence[tuple[str, Any]] = ()
) -> str:
    """Name of the status that ends the call."""
    try:
        if is_stream:
            call = channel.unary_stream(path)(data, timeout=TIMEOUT_SECONDS, metadata=headers)
            for count, _ in enumerate(call):
                if count == MAX_READ:
                    call.cancel()
        else:
            channel.unary_unary(path)(data, timeout=TIMEOUT_SECONDS, metadata=headers)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningService]:
    script = WorkerScript(features=("prefix_cache", "constraints"))
    with running_service(tmp_path, script=script, admin_address="127.0.0.1:0", access_log=False) as started:
        yield started


@pytest.mark.parametrize("num_requests", [1_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_malformed_requests_break_nothing_and_leave_nothing(
    running: RunningService, wait_until: Any, num_requests: int
) -> None:
    codes: Counter[tuple[str, str]] = Counter()
    threads_before = set(threading.enumerate())
    admin_address = f"127.0.0.1:{running.service.admin_port}"
    with (
        grpc.insecure_channel(running.address) as public,
        grpc.insecure_channel(admin_address) as admin,
        ThreadPoolExecutor(CALLERS) as callers,
    ):

        def call(request: tuple[str, Any, bool, bytes]) -> tuple[str, str]:
            path, method, is_admin, data = request
            headers = metadata(random.Random(data))
            return path, code_of(admin if is_admin else public, path, method.server_streaming, data, headers)

        chance = random.Random(SEED)
        codes.update(callers.map(call, requests(num_requests - NUM_DRAINS, chance)))
        for data in drains(NUM_DRAINS, chance):
            codes[START_DRAIN, code_of(admin, START_DRAIN, False, data)] += 1
            assert code_of(admin, STOP_DRAIN, False, b"") in {"OK", "UNAVAILABLE"}
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
    wait_until(lambda: len(set(threading.enumerate()) - threads_before) < 30, "the threads of calls to end")


FLOODS = {
    "chat turns": generation_pb2.GenerationSpec(
        chat=generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage()] * 1_000_000)
    ),
    "tools": generation_pb2.GenerationSpec(
        chat=generation_pb2.ChatPrompt(
            messages=[generation_pb2.ChatMessage(role=generation_pb2.CHAT_ROLE_USER)],
            tools_json=["3"] * 1_000_000,
        )
    ),
    "labels": generation_pb2.GenerationSpec(
        text="x", labels={"\U0001f30a" * 60 + str(number): "v" * 300 for number in range(3_000)}
    ),
    "stop strings": generation_pb2.GenerationSpec(text="x", stop={"stop_strings": [""] * 1_000_000}),
    "choices": generation_pb2.GenerationSpec(text="x", choices={"choices": ["y"] * 1_000_000}),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_however_much_is_wrong_the_client_can_read_what(running: RunningService, kind: str) -> None:
    """Trailers over 8 KiB would be refused by the client; a check per item would stop all streams."""
    data = generation_pb2.GenerateRequest(spec=FLOODS[kind]).SerializeToString()
    assert len(data) < 4 << 20
    with grpc.insecure_channel(running.address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/kvatlas.v1.GenerationService/Generate")(data, timeout=100)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value
    status = rpc_status.from_call(refused.value)
    bad, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    assert any(detail.Unpack(bad) for detail in status.details)
    assert info.reason == "INVALID_FIELD"
    assert bad.field_violations
    trailers = sum(len(key) + len(value) for key, value in refused.value.trailing_metadata())
    assert trailers * 4 / 3 + len(refused.value.details()) < 8192
