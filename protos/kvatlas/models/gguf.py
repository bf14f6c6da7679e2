"""The GGUF container: metadata, tensor directory and raw tensor bytes of a mapped file.

Owns the map of one file. Reads versions 2 and 3, little endian, with the standard library alone;
decodes no weights and knows nothing of models or tokenizers. String arrays are found by their
lengths when the file is opened and decoded only when asked for: a tokenizer's 100,000 strings cost
milliseconds. Every way in which the bytes may be wrong is a ModelError.
Source: the format description, ggml/docs/gguf.md.
"""

import mmap
import struct
from array import array
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

from kvatlas.models.errors import ModelError, ModelErrorReason

# Type number -> name, elements per block, bytes per block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# Scalar value types: struct format, array typecode. BOOL is one byte, 0 or 1.
_SCALARS = {
    0: ("<B", "B"),
    1: ("<b", "b"),
    2: ("<H", "H"),
    3: ("<h", "h"),
    4: ("<I", "I"),
    5: ("<i", "i"),
    6: ("<f", "f"),
    7: ("<?", "B"),
    10: ("<Q", "Q"),
    11: ("<q", "q"),
    12: ("<d", "d"),
}
_MAX_DIMENSIONS = 4
_U64 = struct.Struct("<Q")

Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array in the metadata: where it lies in the file. `start` is past type and count."""

    value_type: int
    count: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor directory."""

    name: str
    type_name: str  # "F32", "Q4_1", ...
    shape: tuple[int, ...]  # outermost first, as numpy and torch say it
    start: int  # in the file
    num_bytes: int


class GgufFile:
    """An open GGUF file. Use as a context manager, or leave closing to the last reader of its bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        self.num_bytes = len(self._map)
        try:
            self._read_directory()
        except ModelError:
            self._map.close()
            raise
        except (struct.error, IndexError, OverflowError, ValueError) as error:
            self._map.close()
            raise self._truncated(f"the directory ends early ({error})") from error

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the file; bytes handed out by `data` must be gone."""
        self._map.close()

    # -- metadata ---------------------------------------------------------------------------------

    def scalar(self, key: str) -> Scalar | None:
        """A single value; None where the key is absent."""
        value = self.metadata.get(key)
        if isinstance(value, GgufArray):
            raise self._corrupt(f"metadata {key!r} is an array, expected one value")
        return value

    def text(self, key: str) -> str | None:
        """A string; None where the key is absent."""
        value = self.scalar(key)
        if value is not None and not isinstance(value, str):
            raise self._corrupt(f"metadata {key!r} is {value!r}, expected a string")
        return value

    def integer(self, key: str) -> int | None:
        """A whole number; None where the key is absent."""
        value = self.scalar(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._corrupt(f"metadata {key!r} is {value!r}, expected a whole number")
        return value

    def number(self, key: str) -> float | None:
        """A number; None where the key is absent."""
        value = self.scalar(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self._corrupt(f"metadata {key!r} is {value!r}, expected a number")
        return value if value is None else float(value)

    def flag(self, key: str) -> bool | None:
        """A truth value; None where the key is absent."""
        value = self.scalar(key)
        if value is not None and not isinstance(value, bool):
            raise self._corrupt(f"metadata {key!r} is {value!r}, expected a truth value")
        return value

    def strings(self, key: str) -> list[str] | None:
        """An array of strings, decoded now; None where the key is absent."""
        found = self._array(key)
        if found is None:
            return None
        if found.value_type != _STRING and found.count:
            raise self._corrupt(f"metadata {key!r} is not an array of strings")
        raw, at, texts = self._map[found.start : found.end], 0, []
        try:
            for _ in range(found.count):
                end = at + 8 + int.from_bytes(raw[at : at + 8], "little")
                texts.append(raw[at + 8 : end].decode())
                at = end
        except UnicodeDecodeError as error:
            raise self._corrupt(f"metadata {key!r} is not UTF-8 ({error})") from error
        return texts

    def numbers(self, key: str) -> "array[int] | array[float] | None":
        """An array of numbers; None where the key is absent."""
        found = self._array(key)
        if found is None:
            return None
        if found.value_type not in _SCALARS:
            raise self._corrupt(f"metadata {key!r} is not an array of numbers")
        return array(_SCALARS[found.value_type][1], self._map[found.start : found.end])

    def raw_array(self, key: str) -> bytes | None:
        """The bytes of an array as the file has them; None where the key is absent."""
        found = self._array(key)
        return None if found is None else self._map[found.start : found.end]

    # -- tensors ----------------------------------------------------------------------------------

    def data(self, tensor: GgufTensor) -> memoryview:
        """The bytes of a tensor, mapped and not copied. Keeps the file open while it lives."""
        return memoryview(self._map)[tensor.start : tensor.start + tensor.num_bytes]

    # -- reading the directory --------------------------------------------------------------------

    def _read_directory(self) -> None:
        if self._map[:4] != _MAGIC:
            raise ModelError(
                ModelErrorReason.UNSUPPORTED_FORMAT,
                f"{self.path} is not a GGUF file: it starts with {self._map[:4]!r}",
            )
        self._at = 4
        self.version = self._scalar(4)
        if self.version not in (2, 3):
            raise ModelError(
                ModelErrorReason.UNSUPPORTED_FORMAT,
                f"{self.path}: GGUF version {_version_name(int(self.version))} is not supported, only 2, 3",
            )
        num_tensors, num_values = int(self._scalar(10)), int(self._scalar(10))
        self.metadata: dict[str, Scalar | GgufArray] = {}
        for _ in range(num_values):
            key = self._string()
            if key in self.metadata:
                raise self._corrupt(f"metadata {key!r} appears twice")
            self.metadata[key] = self._value(int(self._scalar(4)), key)
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        self.tensors = self._place_tensors(entries)

    def _scalar(self, value_type: int) -> bool | int | float:
        layout = _SCALARS[value_type][0]
        (value,) = struct.unpack_from(layout, self._map, self._at)
        self._at += struct.calcsize(layout)
        assert isinstance(value, bool | int | float)
        return value

    def _string(self) -> str:
        start = self._at + 8
        end = start + int(self._scalar(10))
        if end > self.num_bytes:
            raise self._truncated(f"a string of {end - start} bytes at {start} ends past the file")
        self._at = end
        try:
            return self._map[start:end].decode()
        except UnicodeDecodeError as error:
            raise self._corrupt(f"the string at byte {start} is not UTF-8 ({error})") from error

    def _value(self, value_type: int, key: str) -> Scalar | GgufArray:
        if value_type == _STRING:
            return self._string()
        if value_type == _ARRAY:
            return self._array_extent(key)
        if value_type not in _SCALARS:
            raise self._corrupt(f"metadata {key!r} has the unknown type {value_type}")
        return self._scalar(value_type)

    def _array_extent(self, key: str) -> GgufArray:
        value_type, count = int(self._scalar(4)), int(self._scalar(10))
        start = self._at
        if value_type == _STRING:
            end = self._end_of_strings(start, count)
        elif value_type in _SCALARS:
            end = start + count * struct.calcsize(_SCALARS[value_type][0])
        else:
            raise self._corrupt(f"metadata {key!r} is an array of the unsupported type {value_type}")
        if end > self.num_bytes:
            raise self._truncated(f"metadata {key!r} ends past the file")
        self._at = end
        return GgufArray(value_type, count, start, end)

    def _end_of_strings(self, at: int, count: int) -> int:
        unpack, mapped = _U64.unpack_from, self._map
        for _ in range(count):  # at most num_bytes / 8 turns: a read past the file raises
            at += 8 + unpack(mapped, at)[0]
        return at

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = int(self._scalar(4))
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._corrupt(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(int(self._scalar(10)) for _ in range(num_dimensions))[::-1]
        return name, shape, int(self._scalar(4)), int(self._scalar(10))

    def _place_tensors(self, entries: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, GgufTensor]:
        alignment = self.integer("general.alignment") or 32
        first = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_number, offset in entries:
            if name in tensors:
                raise self._corrupt(f"tensor {name!r} appears twice")
            type_name, num_bytes = self._tensor_size(name, shape, type_number)
            if offset % alignment:
                raise self._corrupt(f"tensor {name!r} is not aligned to {alignment} bytes")
            if first + offset + num_bytes > self.num_bytes:
                raise self._truncated(f"tensor {name!r} ends at byte {first + offset + num_bytes}")
            tensors[name] = GgufTensor(name, type_name, shape, first + offset, num_bytes)
        return tensors

    def _tensor_size(self, name: str, shape: tuple[int, ...], type_number: int) -> tuple[str, int]:
        if type_number not in TENSOR_TYPES:
            raise ModelError(
                ModelErrorReason.UNSUPPORTED_QUANTISATION,
                f"{self.path}: tensor {name!r} has the unknown type {type_number}",
            )
        type_name, per_block, block_bytes = TENSOR_TYPES[type_number]
        if shape[-1] % per_block or prod(shape) == 0:
            raise self._corrupt(f"tensor {name!r} of type {type_name} has the impossible shape {shape}")
        return type_name, prod(shape) // per_block * block_bytes

    def _array(self, key: str) -> GgufArray | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, GgufArray):
            raise self._corrupt(f"metadata {key!r} is {value!r}, expected an array")
        return value

    def _truncated(self, what: str) -> ModelError:
        return ModelError(
            ModelErrorReason.FILE_TRUNCATED, f"{self.path} is truncated at {self.num_bytes} bytes: {what}"
        )

    def _corrupt(self, what: str) -> ModelError:
        return ModelError(ModelErrorReason.FILE_CORRUPT, f"{self.path}: {what}")


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelError(ModelErrorReason.FILE_MISSING, f"no such file: {path}") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise ModelError(ModelErrorReason.FILE_TRUNCATED, f"{path} is empty") from error
    except OSError as error:
        raise ModelError(ModelErrorReason.FILE_MISSING, f"cannot read {path}: {error}") from error


def _version_name(version: int) -> str:
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    return f"{swapped} in big-endian byte order" if swapped in (2, 3) else str(version)
