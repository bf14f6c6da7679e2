"""JSON Schemas for tests and measurements: some of each keyword by hand, the rest drawn from a seed.

All can be enforced, and bound what satisfies them, so that an answer of some hundred tokens can be complete.
"""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]

_NAMES = ("name", "age", "city", "id", "tags", "price", "is_open", "size", "kind", "note", "score", "day")
_WORDS = ("red", "green", "blue", "small", "large", "north", "south", "apple", "pear", "one two")


def _object(properties: Mapping[str, Schema], *optional: str) -> Schema:
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": dict(properties),
        "required": required,
        "additionalProperties": False,
    }


_DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
_SHORT: Schema = {"type": "string", "maxLength": 12}

BY_HAND: tuple[Schema, ...] = (
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 100},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "string", "pattern": "^(one|two|three)( and (four|five))?$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"const": {"a": [1, "two", None]}},
    {"enum": ["red", 3, None, True, [1, 2], {"k": "v"}]},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
    {"type": "array", "items": _DIGIT, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [_DIGIT, {"type": "boolean"}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": "head"}], "items": _DIGIT, "minItems": 1, "maxItems": 4},
    {"type": "array", "maxItems": 0},
    _object({}),
    _object({"a": _DIGIT}),
    _object({"a": _DIGIT, "b": _SHORT, "c": {"type": "boolean"}}, "b"),
    _object({"outer": _object({"inner": _object({"leaf": {"type": "null"}})})}),
    {"type": "object", "additionalProperties": _DIGIT, "maxProperties": 0},
    {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "null"}},
        "additionalProperties": False,
        "required": ["x1"],
    },
    {"anyOf": [{"type": "boolean"}, {"const": "maybe"}]},
    {"anyOf": [_object({"kind": {"const": "circle"}, "r": _DIGIT}), _object({"kind": {"const": "point"}})]},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"enum": ["none", "many"]}]},
    {"oneOf": [_object({"k": {"const": "a"}, "v": _DIGIT}), _object({"k": {"const": "b"}})]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {"allOf": [_object({"a": _DIGIT}), {"required": ["a"]}]},
    {"$ref": "#/$defs/point", "$defs": {"point": _object({"x": _DIGIT, "y": _DIGIT})}},
    {
        "$defs": {"t": {"type": "string", "maxLength": 5}},
        "type": "array",
        "items": {"$ref": "#/$defs/t"},
        "minItems": 1,
        "maxItems": 3,
    },
    _object({"line": {"type": "array", "items": {"$ref": "#/$defs/p"}, "maxItems": 2}})
    | {"$defs": {"p": _object({"x": _DIGIT})}},
    {"title": "Weather", "description": "of a day", "examples": [1], "default": 3, **_DIGIT},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/s", **_DIGIT},
    _object({"with space": _DIGIT, 'quo"te': {"type": "null"}, "ünï": {"const": "é😀"}}),
    _object({"flag": {"const": False}, "nothing": {"enum": [None]}, "text": {"const": 'a "quoted" \\ word'}}),
)


def drawn(number: int, depth: int = 3) -> Schema:
    """Schema of a number, the same each time."""
    return _draw(random.Random(number), depth)


def schemas(count: int) -> list[Schema]:
    """Those by hand first, as many as asked for, then drawn ones; no two are equal."""
    found = {json.dumps(schema): schema for schema in BY_HAND[:count]}
    number = 0
    while len(found) < count:
        schema = drawn(number)
        found.setdefault(json.dumps(schema), schema)
        number += 1
    return list(found.values())


def _draw(chance: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [
        _integer,
        _string,
        _literal,
        _choice,
        _text_pattern,
    ]
    if depth > 0:
        kinds = [_record, _record, _record, _list, _either, _referred, *kinds[: chance.randint(1, 5)]]
    return chance.choice(kinds)(chance, depth - 1)


def _integer(chance: random.Random, _: int) -> Schema:
    low = chance.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 5000)}


def _string(chance: random.Random, _: int) -> Schema:
    low = chance.randint(0, 4)
    return {"type": "string", "minLength": low, "maxLength": low + chance.randint(1, 12)}


def _literal(chance: random.Random, _: int) -> Schema:
    return chance.choice([{"type": "boolean"}, {"type": "null"}, {"const": chance.choice(_WORDS)}])


def _choice(chance: random.Random, _: int) -> Schema:
    return {"enum": chance.sample([*_WORDS, 1, 2.5, None, True], chance.randint(1, 5))}


def _text_pattern(chance: random.Random, _: int) -> Schema:
    letters, digits = chance.randint(1, 4), chance.randint(1, 4)
    return {"type": "string", "pattern": f"^[a-z]{{{letters}}}[-_][0-9]{{1,{digits}}}$"}


def _record(chance: random.Random, depth: int) -> Schema:
    names = chance.sample(_NAMES, chance.randint(1, 4))
    optional = [name for name in names if chance.random() < 0.3]
    return _object({name: _draw(chance, depth) for name in names}, *optional)


def _list(chance: random.Random, depth: int) -> Schema:
    low = chance.randint(0, 2)
    return {
        "type": "array",
        "items": _draw(chance, min(depth, 1)),
        "minItems": low,
        "maxItems": low + chance.randint(0, 2),
    }


def _either(chance: random.Random, depth: int) -> Schema:
    return {"anyOf": [_draw(chance, depth) for _ in range(chance.randint(2, 3))]}


def _referred(chance: random.Random, depth: int) -> Schema:
    part = _draw(chance, 0)
    whole = _object({name: {"$ref": "#/$defs/part"} for name in chance.sample(_NAMES, chance.randint(1, 3))})
    # A reference is resolved from the root of the document, so parts stand only there.
    return whole | {"$defs": {"part": part}} if depth == 2 else part
