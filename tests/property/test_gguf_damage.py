"""Damaged GGUF files: whatever the bytes, the reader answers with a file or a ModelError."""

import contextlib
import struct
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.models.errors import ModelError
from kvatlas.models.gguf import GgufArray, GgufFile


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def small_file() -> bytes:
    """Two values, an array of strings, an array of numbers, two tensors."""
    values = [
        text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
        text(b"general.alignment") + struct.pack("<II", 4, 32),
        text(b"tokens") + struct.pack("<IIQ", 9, 8, 3) + text(b"a") + text(b"") + text("é".encode()),
        text(b"types") + struct.pack("<IIQ", 9, 5, 3) + struct.pack("<3i", 1, 2, 3),
    ]
    tensors = [
        text(b"w") + struct.pack("<IQQIQ", 2, 32, 2, 8, 0),
        text(b"b") + struct.pack("<IQIQ", 1, 4, 0, 96),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values + tensors)
    return head + bytes(-len(head) % 32) + bytes(range(112))


WHOLE = small_file()
EDITS = st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=6)


def read_all(raw: bytes) -> None:
    """Opens a file and reads everything that it says it has."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.gguf"
        path.write_bytes(raw)
        file = GgufFile(path)
        for key, value in file.metadata.items():
            if isinstance(value, GgufArray):
                file.raw_array(key)
                (file.strings if value.value_type == 8 else file.numbers)(key)
        for tensor in file.tensors.values():
            assert len(bytes(file.data(tensor))) == tensor.num_bytes


def test_the_undamaged_file_reads() -> None:
    read_all(WHOLE)


@settings(max_examples=400, deadline=None)
@given(edits=EDITS, length=st.integers(0, len(WHOLE)))
def test_damage_is_a_model_error_or_harmless(edits: list[tuple[int, int]], length: int) -> None:
    raw = bytearray(WHOLE)
    for place, value in edits:
        raw[place] = value
    with contextlib.suppress(ModelError):  # and nothing else
        read_all(bytes(raw[:length]))


@settings(max_examples=200, deadline=None)
@given(start=st.integers(4, len(WHOLE) - 8), value=st.integers(0, 2**64 - 1))
def test_any_length_or_count_may_lie(start: int, value: int) -> None:
    raw = bytearray(WHOLE)
    raw[start : start + 8] = struct.pack("<Q", value)
    with contextlib.suppress(ModelError):
        read_all(bytes(raw))
