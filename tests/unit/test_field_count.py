"""Messages of more fields than any request has: refused by their bytes, before protobuf takes them apart."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from kvatlas.v1 import cache_pb2, generation_pb2, server_pb2
from service import field_count
from service.errors import Failure
from service.field_count import UNCOUNTED_BYTES, check_fields
from service.handlers import validate

GENERATE = generation_pb2.GenerateRequest.DESCRIPTOR
SPEC, TOKEN_IDS, SAMPLING, STOP = 1, 4, 6, 7  # numbers of fields
UNKNOWN = b"\x78\x00"  # field 15, which no request has at its top


def varint(number: int) -> bytes:
    head = b""
    while number > 127:
        head += bytes([number & 127 | 128])
        number >>= 7
    return head + bytes([number])


def put(content: bytes, *numbers: int) -> bytes:
    """The content as the bytes of a field, in a field, in a field; the outermost number first."""
    for number in reversed(numbers):
        content = varint(number << 3 | 2) + varint(len(content)) + content
    return content


def refusal(data: bytes, kind: Descriptor = GENERATE) -> tuple[str, ...]:
    """Reason and paths; empty: let through."""
    try:
        check_fields(data, kind)
    except Failure as failure:
        found = failure
    else:
        return ()
    assert found.status is grpc.StatusCode.INVALID_ARGUMENT
    return (found.reason, *(violation.path for violation in found.violations))


def requests() -> Iterator[Descriptor]:
    for module in (generation_pb2, cache_pb2, server_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield method.input_type


def repeated_fields(kind: Descriptor, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each map and repeated field; no type of a request holds itself."""
    example = GetMessageClass(kind)()
    for field in kind.fields:
        value = getattr(example, field.name)
        is_many = hasattr(value, "__len__") and not isinstance(value, str | bytes)
        if is_many:
            yield (*above, field)
        if field.message_type is not None:
            below = list(repeated_fields(field.message_type, (*above, field)))
            assert not (is_many and below), f"{field.full_name}: many of many are not counted"
            yield from below


WAYS = [(kind, way) for kind in requests() for way in repeated_fields(kind)]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a message of some bytes reaches."""
    monkeypatch.setattr(field_count, "MAX_FIELDS", 8)
    monkeypatch.setattr(field_count, "MAX_MAP_ENTRIES", 4)
    monkeypatch.setattr(field_count, "UNCOUNTED_BYTES", 0)


def fullest() -> generation_pb2.GenerateRequest:
    """As much of everything as validation lets through."""
    spec = generation_pb2.GenerationSpec(labels={str(n): "x" for n in range(validate.MAX_LABELS)})
    spec.chat.tools_json.extend(["{}"] * validate.MAX_TOOLS)
    for _ in range(validate.MAX_MESSAGES):
        spec.chat.messages.add(role=generation_pb2.CHAT_ROLE_USER, content="hi", name="x", tool_call_id="y")
    for token_id in range(validate.MAX_BIASES):
        spec.sampling.logit_bias[token_id] = 1.0
    spec.stop.stop_strings.extend(["x"] * validate.MAX_STOP_STRINGS)
    spec.stop.stop_token_ids.extend(range(validate.MAX_STOP_TOKENS))
    spec.choices.choices.extend(str(number) for number in range(validate.MAX_CHOICES))
    return generation_pb2.GenerateRequest(spec=spec)


def test_what_validation_lets_through_is_let_through() -> None:
    message = fullest()
    data = message.SerializeToString()
    assert not validate.generation(message.spec, 2048)
    assert len(data) > UNCOUNTED_BYTES
    assert refusal(data) == ()


def test_packed_ids_are_one_field_and_unpacked_ones_of_one_list_another() -> None:
    ids = put(b"\x05" * 100_000, SPEC, TOKEN_IDS, 1)
    unpacked = put(b"\x08\x85\x01" * 100_000, SPEC, TOKEN_IDS)
    assert refusal(ids) == refusal(unpacked) == ()
    assert len(generation_pb2.GenerateRequest.FromString(unpacked).spec.token_ids.ids) == 100_000


@pytest.mark.parametrize(
    ("kind", "way"), WAYS, ids=[f"{kind.name}-{'.'.join(f.name for f in way)}" for kind, way in WAYS]
)
@pytest.mark.usefixtures("few")
def test_every_map_and_list_of_every_request_is_counted(kind: Descriptor, way: tuple[Any, ...]) -> None:
    path, numbers = ".".join(field.name for field in way), [field.number for field in way]
    inner = way[-1].message_type
    is_map = inner is not None and inner.GetOptions().map_entry
    most = 4 if is_map else 8 - len(numbers[:-1])
    for count, told in ((most, ()), (most + 1, ("INVALID_FIELD", path))):
        assert refusal(put(put(b"", numbers[-1]) * count, *numbers[:-1]), kind) == told


def test_so_many_unpacked_ids_are_a_field_each_since_a_look_at_them_takes_longer_than_protobuf() -> None:
    """4 MiB of them, of one byte each, held the loop for 0.15 s where protobuf takes 0.02 s."""
    bound = field_count.MAX_UNPACKED_BYTES // 2 + field_count.MAX_FIELDS - 2  # two: spec and token_ids
    for count, told in ((bound, ()), (bound + 1, ("INVALID_FIELD", "spec.token_ids.ids"))):
        assert refusal(put(b"\x08\x05" * count, SPEC, TOKEN_IDS)) == told


@pytest.mark.usefixtures("few")
def test_parts_of_a_map_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """protobuf merges them: thousands of one entry each would be one map of thousands."""
    monkeypatch.setattr(field_count, "MAX_FIELDS", 1000)
    part = put(b"\x08\x05", SPEC, SAMPLING, 9)
    assert refusal(part * 4) == ()
    assert refusal(part * 5) == ("INVALID_FIELD", "spec.sampling.logit_bias")


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (UNKNOWN * 9, "(unknown)"),
        (put(UNKNOWN * 9, SPEC, STOP, 7), "spec.stop.max_duration.(unknown)"),
        (put(b"", SPEC) * 9, "spec"),
        (put(put(b"x", 3) * 9, SPEC), "spec.text"),
        (put(b"\x0a\x01\x05" * 9, SPEC, TOKEN_IDS), "spec.token_ids.ids"),
        (put(b"\x20\x05\x28\x01" * 9, SPEC, STOP), "spec.stop.stop_token_ids"),
        (b"\x79" + bytes(8) + b"\x7d" + bytes(4) + UNKNOWN * 7, "(unknown)"),
    ],
)
@pytest.mark.usefixtures("few")
def test_unknown_fields_repeated_parts_and_pieces_of_lists_are_counted(data: bytes, path: str) -> None:
    assert refusal(data) == ("INVALID_FIELD", path)


@pytest.mark.usefixtures("few")
def test_small_messages_and_those_at_the_bound_are_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(UNKNOWN * 8) == refusal(put(put(b"", 9) * 4, SPEC, SAMPLING)) == ()
    monkeypatch.setattr(field_count, "UNCOUNTED_BYTES", 18)
    assert refusal(UNKNOWN * 9) == ()
    assert refusal(UNKNOWN * 9 + b"\x0a\x00") == ("INVALID_FIELD", "(unknown)")


@pytest.mark.usefixtures("few")
def test_groups_are_no_messages_of_ours() -> None:
    assert refusal(b"\x7b\x7c") == ("MALFORMED_MESSAGE",)
    assert refusal(put(b"\x7b\x7c", SPEC)) == ("MALFORMED_MESSAGE",)


@pytest.mark.usefixtures("few")
def test_a_message_that_is_cut_off_is_refused_where_protobuf_refuses_it() -> None:
    whole = b"\x79" + bytes(8) + b"\x7d" + bytes(4) + b"\x78\xff\x7f" + put(put(b"ab", 1) + UNKNOWN, SPEC)
    verdicts = set()
    for end in range(len(whole) + 1):
        try:
            generation_pb2.GenerateRequest.FromString(whole[:end])
            is_taken = True
        except DecodeError:
            is_taken = False
        assert (refusal(whole[:end]) == ()) == is_taken, end
        verdicts.add(is_taken)
    assert verdicts == {True, False}


@pytest.mark.usefixtures("few")
def test_numbers_without_end_are_refused() -> None:
    for data in (b"\xff" * 11, b"\x78" + b"\x80" * 10 + b"\x00", b"\x0a" + b"\xff" * 20):
        assert refusal(data) == ("MALFORMED_MESSAGE",)
