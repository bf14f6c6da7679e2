"""Every limit of AdminService's requests: the last good value passes, the first bad one is named."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from kvatlas.v1 import generation_pb2
from kvatlas.v1 import server_pb2 as pb
from service.errors import Failure
from service.handlers import admin_checks as checks

VOCAB = 500
DAY = 86_400
Check = Callable[[Any], None]


def check_pin(request: pb.SetPinnedPrefixRequest) -> None:
    checks.check_pin(request, VOCAB)


def pin(**more: Any) -> pb.SetPinnedPrefixRequest:
    return pb.SetPinnedPrefixRequest(**({"name": "p", "text": "t"} | more))


def cancel(**more: Any) -> pb.CancelRequestsRequest:
    return pb.CancelRequestsRequest(**({"principal": "p"} | more))


def level(**more: Any) -> pb.SetLogLevelRequest:
    return pb.SetLogLevelRequest(**({"level": pb.LOG_LEVEL_INFO} | more))


def labels(count: int) -> dict[str, str]:
    return {f"l{number}": "" for number in range(count)}


EDGES: list[tuple[Check, str, Any, Any]] = [  # check, path, the last good one, the first bad one
    (
        checks.check_recording,
        "lookback",
        pb.StartRecordingRequest(lookback=Duration(seconds=3600)),
        pb.StartRecordingRequest(lookback=Duration(seconds=3600, nanos=1)),
    ),
    (
        checks.check_recording,
        "lookback",
        pb.StartRecordingRequest(lookback=Duration()),
        pb.StartRecordingRequest(lookback=Duration(nanos=-1)),
    ),
    (
        checks.check_recording,
        "max_duration",
        pb.StartRecordingRequest(max_duration=Duration(nanos=100_000_000)),
        pb.StartRecordingRequest(max_duration=Duration(nanos=99_999_999)),
    ),
    (
        checks.check_recording,
        "max_duration",
        pb.StartRecordingRequest(max_duration=Duration(seconds=3600)),
        pb.StartRecordingRequest(max_duration=Duration(seconds=3601)),
    ),
    (
        checks.check_recording,
        "max_bytes",
        pb.StartRecordingRequest(max_bytes=65_536),
        pb.StartRecordingRequest(max_bytes=65_535),
    ),
    (
        checks.check_recording,
        "max_bytes",
        pb.StartRecordingRequest(max_bytes=2**30),
        pb.StartRecordingRequest(max_bytes=2**30 + 1),
    ),
    (
        checks.check_recording,
        "note",
        pb.StartRecordingRequest(note="n" * 256),
        pb.StartRecordingRequest(note="n" * 257),
    ),
    (
        checks.check_drain,
        "grace",
        pb.StartDrainRequest(grace=Duration(seconds=DAY)),
        pb.StartDrainRequest(grace=Duration(seconds=DAY + 1)),
    ),
    (
        checks.check_drain,
        "grace",
        pb.StartDrainRequest(grace=Duration()),
        pb.StartDrainRequest(grace=Duration(seconds=-1)),
    ),
    (
        checks.check_flush,
        "tenant",
        pb.FlushPrefixCacheRequest(tenant="t" * 64),
        pb.FlushPrefixCacheRequest(tenant="t" * 65),
    ),
    (
        checks.check_flush,
        "tenant",
        pb.FlushPrefixCacheRequest(tenant="a_.-9"),
        pb.FlushPrefixCacheRequest(tenant="a\0"),
    ),
    (
        checks.check_flush,
        "salt",
        pb.FlushPrefixCacheRequest(salt="ä" * 32),
        pb.FlushPrefixCacheRequest(salt="ä" * 32 + "s"),
    ),
    (check_pin, "name", pin(name="n" * 64), pin(name="n" * 65)),
    (check_pin, "name", pin(name="A-z_0.9:"), pin(name="")),
    (check_pin, "prefix", pin(), pb.SetPinnedPrefixRequest(name="p")),
    (check_pin, "name", pb.SetPinnedPrefixRequest(name="p", remove=True), pin(name="a b", remove=True)),
    (check_pin, "tenant", pin(tenant="t" * 64), pin(tenant="t" * 65)),
    (check_pin, "salt", pin(salt="s" * 64), pin(salt="s" * 65)),
    (check_pin, "ttl", pin(ttl=Duration(nanos=1)), pin(ttl=Duration())),
    (check_pin, "ttl", pin(ttl=Duration(seconds=3650 * DAY)), pin(ttl=Duration(seconds=3650 * DAY + 1))),
    (
        checks.check_list,
        "max_results",
        pb.ListPinnedPrefixesRequest(max_results=1000),
        pb.ListPinnedPrefixesRequest(max_results=1001),
    ),
    (checks.check_cancel, "request_ids", cancel(principal="p"), cancel(principal="")),
    (checks.check_cancel, "request_ids", cancel(principal="", request_ids=["r"]), cancel(principal="")),
    (checks.check_cancel, "request_ids", cancel(principal="", labels={"a": ""}), cancel(principal="")),
    (checks.check_cancel, "request_ids", cancel(request_ids=["r"] * 256), cancel(request_ids=["r"] * 257)),
    (checks.check_cancel, "request_ids[1]", cancel(request_ids=["r", "s"]), cancel(request_ids=["r", "s s"])),
    (checks.check_cancel, "reason", cancel(reason="r" * 256), cancel(reason="r" * 257)),
    (checks.check_cancel, "principal", cancel(principal="p" * 128), cancel(principal="p" * 129)),
    (checks.check_cancel, "labels", cancel(labels=labels(16)), cancel(labels=labels(17))),
    (checks.check_level, "level", level(), level(level=0)),
    (checks.check_level, "level", level(), level(level=99)),
    (checks.check_level, "logger", level(logger="l" * 128), level(logger="l" * 129)),
    (
        checks.check_level,
        "duration",
        level(duration=Duration(seconds=DAY)),
        level(duration=Duration(seconds=DAY + 1)),
    ),
    (checks.check_profile, "steps", pb.CaptureProfileRequest(steps=1), pb.CaptureProfileRequest()),
    (
        checks.check_profile,
        "steps",
        pb.CaptureProfileRequest(steps=1000),
        pb.CaptureProfileRequest(steps=1001),
    ),
]


@pytest.mark.parametrize(("check", "path", "good", "bad"), EDGES)
def test_the_last_good_value_passes_and_the_first_bad_one_is_named(
    check: Check, path: str, good: Any, bad: Any
) -> None:
    check(good)
    with pytest.raises(Failure) as refused:
        check(bad)
    assert [violation.path for violation in refused.value.violations] == [path]


def test_the_prefix_of_a_pin_is_the_prompt_that_requests_will_have() -> None:
    user = generation_pb2.ChatMessage(role=generation_pb2.CHAT_ROLE_USER, content="hi")
    chat = generation_pb2.ChatPrompt(messages=[user])
    ids = generation_pb2.TokenSequence(ids=[1, 2])
    assert checks.spec_of_pin(pin(model="m")) == generation_pb2.GenerationSpec(model="m", text="t")
    assert checks.spec_of_pin(pin(text=None, token_ids=ids)) == generation_pb2.GenerationSpec(token_ids=ids)
    spec = checks.spec_of_pin(pin(text=None, chat=chat))
    assert list(spec.chat.messages) == [user]
    assert (spec.chat.HasField("add_generation_prompt"), spec.chat.add_generation_prompt) == (True, False)
