"""Messages that nobody means to send: random fields with extreme values, and bytes that are damaged.

What tests of the API and of the seam share. Everything comes from the `random.Random` that is handed in.
"""

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_DEPTH = 5

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


def value(field: Any, chance: random.Random) -> Any:  # a FieldDescriptor, of one of two classes
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
