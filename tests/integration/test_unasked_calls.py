"""Health and reflection, which ask nobody who he is: bounded, and as strict with bytes as the rest."""

import random
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from service import guard
from service.testing import running_service
from service.testing_damage import mutated

HEALTH = "/grpc.health.v1.Health"
REFLECTION = tuple(
    f"/grpc.reflection.{each}.ServerReflection/ServerReflectionInfo" for each in ("v1", "v1alpha")
)
WATCHED = b"\x0a\x1ckvatlas.v1.GenerationService"


def told(call: Any) -> tuple[str, str]:
    """Status and reason of a stream that was read until it ended, or until its first message."""
    try:
        for _ in call:
            return "OK", ""
    except grpc.RpcError as error:
        status = rpc_status.from_call(error)
        info = error_details_pb2.ErrorInfo()
        if status is not None and any(detail.Unpack(info) for detail in status.details):
            return error.code().name, info.reason
        return error.code().name, ""
    return "OK", ""


def test_watches_of_health_are_so_many_at_most_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    monkeypatch.setattr(guard, "MAX_UNASKED", 3)
    with running_service(tmp_path) as service, grpc.insecure_channel(service.address) as channel:
        watch, check = channel.unary_stream(f"{HEALTH}/Watch"), channel.unary_unary(f"{HEALTH}/Check")
        open_ones = [watch(WATCHED, timeout=100) for _ in range(3)]
        for each in open_ones:
            next(each)
        assert told(watch(WATCHED, timeout=100)) == ("RESOURCE_EXHAUSTED", "WATCH_LIMIT")
        assert told(channel.stream_stream(REFLECTION[0])(iter([b""]), timeout=100))[0] == "RESOURCE_EXHAUSTED"
        assert check(WATCHED, timeout=100), "a probe finds its place, or the service would be restarted"
        generate = channel.unary_unary("/kvatlas.v1.ServerService/GetServerInfo")
        assert generate(b"", timeout=100), "who has something to ask is answered"
        for each in open_ones:
            each.cancel()
        wait_until(lambda: told(watch(WATCHED, timeout=100)) == ("OK", ""), "the places to be given back")


def test_bytes_that_are_no_message_are_refused_as_such(tmp_path: Path) -> None:
    chance = random.Random(3)
    fine = reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvatlas.v1.GenerationService")
    codes = set()
    with running_service(tmp_path) as service, grpc.insecure_channel(service.address) as channel:
        for number in range(60):
            data = mutated(fine.SerializeToString() if number % 2 else WATCHED, chance)
            for method in ("Check", "List"):
                try:
                    channel.unary_unary(f"{HEALTH}/{method}")(data, timeout=100)
                except grpc.RpcError as error:
                    codes.add(error.code().name)
            codes.add(told(channel.unary_stream(f"{HEALTH}/Watch")(data, timeout=100))[0])
            codes.add(told(channel.stream_stream(REFLECTION[number % 2])(iter([data]), timeout=100))[0])
        wrong = channel.stream_stream(REFLECTION[0])(iter([b"\xff\xff"]), timeout=100)
        assert told(wrong) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")
        assert (
            told(channel.stream_stream(REFLECTION[0])(iter([fine.SerializeToString()]), timeout=100))[0]
            == "OK"
        )
    assert codes <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}, codes
