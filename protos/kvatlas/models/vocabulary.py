"""What worker and service must agree on about a tokenizer: its ids, its special tokens, its digest.

Computed from the model's files the same way on both sides. Tokenizes nothing, except with the byte
vocabulary of random models.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.files import ModelFiles, ModelKind
from kvatlas.models.gguf import GgufFile

BYTE_BOS, BYTE_EOS = 256, 257
MOST_IDS = 1 << 24
"""Of any vocabulary: a damaged file may name billions, and a table has room for each."""
_UNUSED = 5  # tokenizer.ggml.token_type of padding
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGUF_DIGESTED = ("tokens", "merges", "scores", "token_type")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids of a model's tokenizer."""

    num_ids: int | None  # one past the largest id that means something; None: the files do not say
    bos_id: int | None
    eos_ids: frozenset[int]  # any of them ends a sequence (the union of all files' opinions)


def read_vocabulary(files: ModelFiles) -> Vocabulary:
    """Reads the ids from the model's files."""
    match files.kind:
        case ModelKind.GGUF:
            with GgufFile(files.location) as file:
                return gguf_vocabulary(file)
        case ModelKind.FOLDER:
            return _folder_vocabulary(files.location)
        case ModelKind.RANDOM:
            return Vocabulary(None, BYTE_BOS, frozenset({BYTE_EOS}))


def gguf_vocabulary(file: GgufFile) -> Vocabulary:
    """The same of an open GGUF file."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    num_ids = getattr(tokens, "count", None)
    kinds = file.numbers("tokenizer.ggml.token_type") if num_ids else None
    if kinds and num_ids:
        # Converters pad the vocabulary to the embedding's rows with unused tokens: never sampled (B054).
        while num_ids > 1 and num_ids <= len(kinds) and kinds[num_ids - 1] == _UNUSED:
            num_ids -= 1
    ends = (_gguf_id(file, key, num_ids) for key in _GGUF_EOS_KEYS)
    bos = _gguf_id(file, "bos_token_id", num_ids)
    return Vocabulary(num_ids, bos, frozenset(end for end in ends if end is not None))


def _gguf_id(file: GgufFile, key: str, num_ids: int | None) -> int | None:
    """A token's id; None where the file gives none, or, as 2^32 - 1 does, one that no token has."""
    value = file.integer(f"tokenizer.ggml.{key}")
    return value if value is not None and 0 <= value < (num_ids or MOST_IDS) else None


def tokenizer_digest(files: ModelFiles) -> str:
    """SHA-256, in hex, of what turns text into ids. Equal digests: the same ids for the same text."""
    match files.kind:
        case ModelKind.GGUF:
            with GgufFile(files.location) as file:
                return _gguf_digest(file)
        case ModelKind.FOLDER:
            return hashlib.sha256(_read(files.location / "tokenizer.json")).hexdigest()
        case ModelKind.RANDOM:
            return hashlib.sha256(b"kvatlas byte vocabulary 1").hexdigest()


def byte_encode(text: str) -> list[int]:
    """Ids of the byte vocabulary: one per UTF-8 byte."""
    return list(text.encode())


def byte_decode(ids: Iterable[int]) -> bytes:
    """Bytes of ids of the byte vocabulary; ids past it, which random models sample, show as ASCII."""
    return bytes(i if i < 256 else 32 + i % 95 for i in ids if i not in (BYTE_BOS, BYTE_EOS))


def _gguf_digest(file: GgufFile) -> str:
    digest = hashlib.sha256()
    for key in ("model", "pre"):
        digest.update(f"{key}={file.text(f'tokenizer.ggml.{key}')}\n".encode())
    for key in ("add_bos_token", "add_space_prefix"):
        digest.update(f"{key}={file.flag(f'tokenizer.ggml.{key}')}\n".encode())
    for key in _GGUF_DIGESTED:
        raw = file.raw_array(f"tokenizer.ggml.{key}") or b""
        digest.update(f"{key}:{len(raw)}\n".encode())
        digest.update(raw)  # length-prefixed strings, little endian: already canonical
    return digest.hexdigest()


def _folder_vocabulary(folder: Path) -> Vocabulary:
    tokenizer = _optional_json(folder / "tokenizer.json")
    settings = _optional_json(folder / "tokenizer_config.json")
    configs = [_optional_json(folder / name) for name in ("generation_config.json", "config.json")]
    ids = ids_by_token(tokenizer)
    eos: set[int] = set()
    for config in configs:
        eos |= _as_ids(config.get("eos_token_id"), folder)
    eos |= _named_ids(settings.get("eos_token"), ids)
    bos = _named_ids(settings.get("bos_token"), ids)
    for config in configs:
        bos = bos or _as_ids(config.get("bos_token_id"), folder)
    return Vocabulary(max(ids.values()) + 1 if ids else None, min(bos, default=None), frozenset(eos))


def ids_by_token(tokenizer: Mapping[str, object]) -> dict[str, int]:
    """Vocabulary and added tokens of a tokenizer.json."""
    try:
        ids = _ids_by_token(tokenizer)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        text = f"tokenizer.json: its vocabulary cannot be read ({error!r})"
        raise ModelError(ModelErrorReason.FILE_CORRUPT, text) from error
    odd = next(
        (f"{token!r} has the id {number}" for token, number in ids.items() if not _is_id(number)), None
    )
    if odd is not None:
        raise ModelError(ModelErrorReason.FILE_CORRUPT, f"tokenizer.json: {odd}")
    return ids


def _ids_by_token(tokenizer: Mapping[str, object]) -> dict[str, int]:
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    ids: dict[str, int] = {}
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        ids.update({str(token): int(number) for token, number in vocabulary.items()})
    elif isinstance(vocabulary, list):  # unigram: [token, score], the id is the place
        ids.update({str(entry[0]): number for number, entry in enumerate(vocabulary)})
    for entry in added if isinstance(added, list) else []:
        ids[str(entry["content"])] = int(entry["id"])
    return ids


def _named_ids(token: object, ids: Mapping[str, int]) -> set[int]:
    """Id of a token that is given by name, or as {"content": name}."""
    name = token.get("content") if isinstance(token, dict) else token
    return {ids[name]} if isinstance(name, str) and name in ids else set()


def _as_ids(value: object, folder: Path) -> set[int]:
    """Ids that are given as a number, a list or not at all."""
    values = value if isinstance(value, list) else [value] if value is not None else []
    if not all(_is_id(number) for number in values):
        raise ModelError(ModelErrorReason.INVALID_CONFIG, f"{folder}: token id {value!r} is no id")
    return set(values)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_IDS


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file that must be there."""
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise ModelError(ModelErrorReason.FILE_CORRUPT, f"{path} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(ModelErrorReason.FILE_CORRUPT, f"{path} is not a JSON object")
    return value


def _optional_json(path: Path) -> dict[str, object]:
    return read_json(path) if path.exists() else {}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(ModelErrorReason.FILE_MISSING, f"no such file: {path}") from error
    except OSError as error:
        raise ModelError(ModelErrorReason.FILE_MISSING, f"cannot read {path}: {error}") from error
