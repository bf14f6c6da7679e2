"""How many fields and entries a message has, counted in its bytes before protobuf makes objects of them.

Owns the bounds; knows of no field what it is for. protobuf holds the interpreter while it parses: no stream
goes on meanwhile, and a thread would not help. 4 MiB of map entries took it 0.3 s, and 10 s where their keys
meet in one place of its table, which a number's low bits choose (protobuf 7.36). So what has more than any
request of ours is refused unparsed.
"""

import re
from collections import Counter
from functools import cache
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

from service import errors
from service.errors import Failure, Violation

MAX_FIELDS = 8192  # the fullest legal request has some 5,500: turns, biases, tools, stop tokens
MAX_MAP_ENTRIES = 1024  # of one map, as validation has it: 1.6 ms where all keys meet, 77 ms for 8192
MAX_UNPACKED_BYTES = 512 * 1024  # of numbers with a tag each, as proto3 writes none: 4 to 12 ms
UNCOUNTED_BYTES = 8 * 1024  # take protobuf 2 ms at most, whatever they are; 64 KiB took 0.1 s
_VARINT, _BYTES = 0, 2
_NUM_FIXED = {1: 8, 5: 4}


class _Field(NamedTuple):
    """What the walk knows of a tag."""

    path: str
    inner: Descriptor | None = None  # of a message that may come once: its fields count too
    run: re.Pattern[bytes] | None = None  # of numbers that came unpacked: the rest of them, one after another
    is_map: bool = False


def check_fields(data: bytes, kind: Descriptor) -> None:
    """Raises Failure, as validation would, for a map or a message of more than any request of ours may have.

    Packed numbers are one field, and so are MAX_UNPACKED_BYTES of unpacked ones in a row. Fields inside of an
    entry are not counted, nor is anything in a message of at most UNCOUNTED_BYTES.
    """
    if len(data) <= UNCOUNTED_BYTES:
        return
    try:
        _Walk(data).message(kind, 0, len(data), "")
    except IndexError:
        raise errors.malformed_message() from None


class _Walk:
    """One message's bytes, and the path of each field that was found in them."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._seen: list[str] = []
        self._unpacked_left = MAX_UNPACKED_BYTES
        self._entries: Counter[str] = Counter()  # of maps; one may come in parts, which protobuf merges

    def message(self, kind: Descriptor, at: int, end: int, prefix: str) -> None:
        """Looks at data[at:end]. Raises Failure; IndexError where the bytes end too early."""
        data, seen, fields = self._data, self._seen, _fields_of(kind, prefix)
        unknown = _Field(f"{prefix}(unknown)")
        while at < end:
            tag, at = data[at], at + 1
            if tag > 127:
                tag, at = self._rest(tag, at)
            path, inner, run, is_map = fields.get(tag, unknown)
            seen.append(path)
            if is_map or len(seen) > MAX_FIELDS:
                self._check_counts(path)
            if (wire := tag & 7) in _NUM_FIXED:
                at += _NUM_FIXED[wire]
                continue
            number, at = data[at], at + 1
            if number > 127:
                number, at = self._rest(number, at)
            if wire == _BYTES:
                at += number
                if inner is not None and at <= end:
                    self.message(inner, at - number, at, f"{path}.")
            elif wire != _VARINT:  # a group: we have none, and what is in it could pass for fields of ours
                raise errors.malformed_message()
            elif run is not None:
                at = self._behind_run(run, at, end)
        if at > end:
            raise errors.malformed_message()

    def _check_counts(self, path: str) -> None:
        """Behind an entry of a map, and behind the last field that may be."""
        self._entries[path] += 1
        if len(self._seen) > MAX_FIELDS:
            [(most, _)] = Counter(self._seen).most_common(1)
            raise _too_many(
                most, f"more than {MAX_FIELDS} fields and entries in a message, most of them here"
            )
        if self._entries[path] > MAX_MAP_ENTRIES:
            raise _too_many(path, f"more than {MAX_MAP_ENTRIES} entries")

    def _behind_run(self, run: re.Pattern[bytes], at: int, end: int) -> int:
        """Where the numbers that follow end; beyond what may come unpacked each is a field of its own."""
        more = run.match(self._data, at, min(end, at + self._unpacked_left))
        if more is None:
            return at
        self._unpacked_left -= more.end() - at
        return more.end()

    def _rest(self, first: int, at: int) -> tuple[int, int]:
        """A number of at most ten bytes that began with `first`, and where it ends."""
        value = first & 127
        for shift in range(7, 70, 7):
            byte, at = self._data[at], at + 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, at
        raise errors.malformed_message()


def _too_many(path: str, text: str) -> Failure:
    return errors.invalid_fields([Violation(path, text)])


@cache
def _fields_of(kind: Descriptor, prefix: str) -> dict[int, _Field]:
    """Fields by the tags that they come with; a request's types hold none of their own, so there are few."""
    told, found = DescriptorProto(), {}
    kind.CopyToProto(told)
    for field in told.field:
        path, tag = f"{prefix}{field.name}", field.number << 3
        is_many = field.label == FieldDescriptorProto.LABEL_REPEATED
        inner = kind.fields_by_name[field.name].message_type
        is_map = inner is not None and inner.GetOptions().map_entry
        found[tag | _BYTES] = _Field(path, None if is_many else inner, is_map=is_map)
        found[tag | _VARINT] = _Field(path, run=_run_of(tag) if is_many else None)
    return found


def _run_of(tag: int) -> re.Pattern[bytes]:
    """Any number of varints with this tag, in C: some 30 ns each."""
    written = bytes([tag]) if tag < 128 else bytes([tag & 127 | 128, tag >> 7])
    return re.compile(rb"(?:%b[\x80-\xff]{0,9}[\x00-\x7f])*+" % re.escape(written))
