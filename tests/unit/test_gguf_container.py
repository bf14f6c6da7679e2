"""The GGUF container reader against files written by the format's own library, and against broken ones."""

import struct
from array import array
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.gguf import TENSOR_TYPES, GgufFile

TOKENS = ["<s>", "a", "\u0120b", "é😀", ""]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small file with every kind of entry."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_int64("test.negative", -5)
    writer.add_array("tokenizer.ggml.tokens", TOKENS)
    writer.add_array("tokenizer.ggml.token_type", [3, 1, 1, 1, 5])
    writer.add_tensor("dense", np.arange(6, dtype=np.float32).reshape(2, 3))
    quantized = gguf.quants.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_is_read_by_kind(path: Path) -> None:
    with GgufFile(path) as file:
        assert file.version == 3
        assert file.text("general.architecture") == "llama"
        assert file.integer("llama.block_count") == 2
        assert file.number("llama.rope.freq_base") == 10000.0
        assert file.flag("tokenizer.ggml.add_bos_token") is True
        assert file.integer("test.negative") == -5
        assert file.strings("tokenizer.ggml.tokens") == TOKENS
        assert file.numbers("tokenizer.ggml.token_type") == array("i", [3, 1, 1, 1, 5])


def test_absent_keys_are_none(path: Path) -> None:
    with GgufFile(path) as file:
        assert file.text("no") is file.integer("no") is file.number("no") is file.flag("no") is None
        assert file.strings("no") is file.numbers("no") is file.raw_array("no") is None


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("text", "llama.block_count"),
        ("integer", "general.architecture"),
        ("integer", "tokenizer.ggml.add_bos_token"),
        ("number", "general.architecture"),
        ("flag", "llama.block_count"),
        ("scalar", "tokenizer.ggml.tokens"),
        ("strings", "tokenizer.ggml.token_type"),
        ("numbers", "tokenizer.ggml.tokens"),
        ("strings", "general.architecture"),
    ],
)
def test_a_value_of_another_kind_is_an_error_that_names_the_key(path: Path, method: str, key: str) -> None:
    with GgufFile(path) as file, pytest.raises(ModelError, match=key) as caught:
        getattr(file, method)(key)
    assert caught.value.reason is ModelErrorReason.FILE_CORRUPT


def test_tensors_have_their_shape_and_bytes(path: Path) -> None:
    with GgufFile(path) as file:
        dense, packed = file.tensors["dense"], file.tensors["packed"]
        assert (dense.type_name, dense.shape, dense.num_bytes) == ("F32", (2, 3), 24)
        assert (packed.type_name, packed.shape, packed.num_bytes) == ("Q8_0", (4, 64), 4 * 2 * 34)
        assert bytes(file.data(dense)) == np.arange(6, dtype="<f4").tobytes()


def test_type_sizes_equal_those_of_the_format_s_library() -> None:
    for number, (name, per_block, block_bytes) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name
        assert gguf.GGML_QUANT_SIZES[kind] == (per_block, block_bytes), name


def test_a_file_cut_anywhere_is_refused(path: Path) -> None:
    """Every single length: never another exception, never success."""
    whole = path.read_bytes()
    last = max(tensor.start + tensor.num_bytes for tensor in GgufFile(path).tensors.values())
    cut = path.with_name("cut.gguf")
    for length in range(last):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError) as caught:
            GgufFile(cut)
        assert caught.value.reason in (ModelErrorReason.FILE_TRUNCATED, ModelErrorReason.UNSUPPORTED_FORMAT)


def test_a_tensor_past_the_end_is_named(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ModelError, match="'packed' ends at byte"):
        GgufFile(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf") as caught:
        GgufFile(tmp_path / "none.gguf")
    assert caught.value.reason is ModelErrorReason.FILE_MISSING


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version 1 "),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "version 3 in big-endian"),
        (b"GGUF" + struct.pack("<I", 99) + bytes(40), "version 99 "),
    ],
)
def test_other_formats_and_versions_are_refused_by_name(tmp_path: Path, header: bytes, words: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(header)
    with pytest.raises(ModelError, match=words) as caught:
        GgufFile(path)
    assert caught.value.reason is ModelErrorReason.UNSUPPORTED_FORMAT


def test_an_unknown_tensor_type_names_the_tensor(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    # The type number stands behind the name, the number of dimensions (4) and two dimensions (8 each).
    at = raw.index(b"packed") + len("packed") + 4 + 16
    raw[at : at + 4] = struct.pack("<I", 77)
    path.write_bytes(raw)
    with pytest.raises(ModelError, match="'packed' has the unknown type 77") as caught:
        GgufFile(path)
    assert caught.value.reason is ModelErrorReason.UNSUPPORTED_QUANTISATION


def test_a_huge_count_costs_no_memory(path: Path) -> None:
    """An array that claims 2^60 strings is refused as truncated, not allocated."""
    raw = bytearray(path.read_bytes())
    at = raw.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    raw[at : at + 8] = struct.pack("<Q", 1 << 60)
    path.write_bytes(raw)
    with pytest.raises(ModelError) as caught:
        GgufFile(path)
    assert caught.value.reason is ModelErrorReason.FILE_TRUNCATED


@pytest.mark.model
def test_the_embedded_model_opens_without_decoding_its_strings(model_path: Path) -> None:
    """The tokenizer's 98,052 strings are found by their lengths; decoded, they are what the library reads."""
    with GgufFile(model_path) as file:
        tokens, merges = file.strings("tokenizer.ggml.tokens"), file.strings("tokenizer.ggml.merges")
        assert len(file.tensors) == 272
    assert tokens is not None
    assert merges is not None
    assert (len(tokens), len(merges)) == (49152, 48900)
    assert tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert merges[0] == "\u0120 t"
