"""What both processes compute of a tokenizer: digests that tell tokenizers apart, and the byte vocabulary."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.resolve import resolve_model
from kvatlas.models.vocabulary import (
    BYTE_BOS,
    BYTE_EOS,
    Vocabulary,
    byte_decode,
    byte_encode,
    read_vocabulary,
    tokenizer_digest,
)

TOKENIZER: dict[str, Any] = {
    "pre": "smollm",
    "tokens": ["a", "b", "ab"],
    "merges": ["a b"],
    "types": [1, 1, 1],
    "add_bos": False,
}


def digest(path: Path, **changes: Any) -> str:
    settings = {**TOKENIZER, **changes}
    writer = gguf.GGUFWriter(path, settings.get("architecture", "llama"))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(settings["pre"])
    writer.add_token_list(settings["tokens"])
    writer.add_token_merges(settings["merges"])
    writer.add_token_types(settings["types"])
    writer.add_add_bos_token(settings["add_bos"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return tokenizer_digest(resolve_model(str(path)))


def test_the_digest_depends_on_the_tokenizer_alone(tmp_path: Path) -> None:
    assert digest(tmp_path / "a.gguf") == digest(tmp_path / "b.gguf", architecture="qwen2")


@pytest.mark.parametrize(
    "changes",
    [
        {"pre": "qwen2"},
        {"tokens": ["a", "b", "ba"]},
        {"tokens": ["a", "ba", "b"]},
        {"merges": ["b a"]},
        {"types": [1, 1, 3]},
        {"add_bos": True},
    ],
)
def test_whatever_changes_ids_changes_the_digest(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert digest(tmp_path / "a.gguf") != digest(tmp_path / "b.gguf", **changes)


def test_a_folder_s_digest_is_that_of_its_tokenizer_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"tokenizer\.json") as caught:
        tokenizer_digest(files)
    assert caught.value.reason is ModelErrorReason.FILE_MISSING
    (tmp_path / "tokenizer.json").write_bytes(b"abc")
    # SHA-256 of "abc", FIPS 180-2, appendix B.1.
    assert tokenizer_digest(files) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    "odd",
    [
        {"model": {"vocab": {"a": "first"}}},
        {"model": {"vocab": {"a": 1 << 40}}},
        {"model": {"vocab": {"a": float("inf")}}},
        {"model": {"vocab": ["a"]}, "added_tokens": [{"id": 1}]},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [5]},
    ],
)
def test_a_vocabulary_that_cannot_be_is_corrupt(tmp_path: Path, odd: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text(json.dumps(odd))
    with pytest.raises(ModelError, match=r"tokenizer\.json") as caught:
        read_vocabulary(resolve_model(str(tmp_path)))
    assert caught.value.reason is ModelErrorReason.FILE_CORRUPT


@pytest.mark.parametrize("eos", ["true", "1e3", str(1 << 40), "[2, null]"])
def test_an_end_token_that_is_no_id_is_named(tmp_path: Path, eos: str) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": ' + eos + "}")
    with pytest.raises(ModelError, match="is no id") as caught:
        read_vocabulary(resolve_model(str(tmp_path)))
    assert caught.value.reason is ModelErrorReason.INVALID_CONFIG


def test_an_id_that_no_token_of_a_file_has_is_none(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_bos_token_id(2**32 - 1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_vocabulary(resolve_model(str(tmp_path / "a.gguf"))) == Vocabulary(3, None, frozenset({2}))


def test_random_models_share_one_byte_vocabulary() -> None:
    one, other = resolve_model("random:tiny"), resolve_model("random:qwen3-0.6b")
    assert tokenizer_digest(one) == tokenizer_digest(other)
    assert read_vocabulary(one) == Vocabulary(None, BYTE_BOS, frozenset({BYTE_EOS}))


def test_bytes_go_there_and_back() -> None:
    text = "plain, äöü, 日本, 😀"
    assert byte_decode(byte_encode(text)).decode() == text


def test_ids_past_the_bytes_show_as_ascii_and_special_ones_not_at_all() -> None:
    shown = byte_decode([*range(258, 151_936), BYTE_BOS, BYTE_EOS])
    assert len(shown) == 151_936 - 258
    assert set(shown) == set(range(32, 127))


@pytest.mark.model
def test_the_embedded_model_s_vocabulary(model_path: Path) -> None:
    files = resolve_model(str(model_path))
    assert read_vocabulary(files) == Vocabulary(49152, 1, frozenset({2}))
    assert len(tokenizer_digest(files)) == 64
