"""A tokenizer's vocabulary as plain data: tokens by id, special ones, BOS, chat template.

Read from a GGUF file, from a folder with tokenizer.json, or made up for random weights. Owns the
reading. How text is split is the service's; what both processes must agree on is in `vocabulary.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvatlas.models import vocabulary as shared
from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.files import ModelFiles, ModelKind
from kvatlas.models.gguf import GgufFile
from kvatlas.models.shapes import SHAPES
from kvatlas.models.token_bytes import Spelling, spell_bytes

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""tokenizer.ggml.token_type: made from text · special · found whole in text, but shown."""

LLAMA3_PRE = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe")
_TEMPLATE_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_GGUF_TEMPLATE = "tokenizer.chat_template"
_TOY_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TextVocabulary:
    """What is known of a tokenizer beside its way of splitting text."""

    tokens: list[str]  # by id, as the vocabulary spells them; "" for an id without a token
    spelling: Spelling
    special_ids: frozenset[int]  # control tokens: not shown, never made from the text of a chat turn
    eos_ids: frozenset[int]
    bos_id: int | None = None
    adds_bos: bool = False  # whether raw text gets BOS in front
    strips_first_space: bool = False  # on decoding: SentencePiece puts one before the first word
    chat_template: str | None = None
    template_variables: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...


def read_text_vocabulary(files: ModelFiles) -> TextVocabulary:
    """Reads a model's files. Raises ModelError naming what is missing or not supported."""
    match files.kind:
        case ModelKind.GGUF:
            with GgufFile(files.location) as file:
                return gguf_vocabulary(file)
        case ModelKind.FOLDER:
            parsed = shared.read_json(files.location / "tokenizer.json")
            return folder_vocabulary(files, parsed, shared.ids_by_token(parsed))
        case ModelKind.RANDOM:
            return toy_vocabulary(toy_size(files))


def read_chat_template(files: ModelFiles) -> str | None:
    """The model's own template alone; None: it has none."""
    match files.kind:
        case ModelKind.GGUF:
            with GgufFile(files.location) as file:
                return file.text(_GGUF_TEMPLATE)
        case ModelKind.FOLDER:
            settings = _optional_json(files.location / "tokenizer_config.json")
            return _folder_template(files.location, settings)
        case ModelKind.RANDOM:
            return _TOY_TEMPLATE


def toy_size(files: ModelFiles) -> int:
    """Tokens of the byte vocabulary of a random model's shape."""
    shape = SHAPES.get(files.shape or "")
    size = shape.get("vocab_size") if shape else None
    if not isinstance(size, int):
        raise ModelError(ModelErrorReason.UNKNOWN_MODEL, f"{files.name}: no shape {files.shape!r} is known")
    return size


def toy_vocabulary(size: int) -> TextVocabulary:
    """The byte vocabulary of random models, as `kvatlas.models.vocabulary` numbers it.

    Ids past the special ones are never made from text; they show as one ASCII character.
    """
    assert size > shared.BYTE_EOS, f"a byte vocabulary needs over {shared.BYTE_EOS} tokens, got {size}"
    tokens = [spell_bytes(shared.byte_decode([token_id])) for token_id in range(size)]
    tokens[:256] = [spell_bytes(bytes([byte])) for byte in range(256)]
    tokens[shared.BYTE_BOS], tokens[shared.BYTE_EOS] = "<|begin|>", "<|end|>"
    return TextVocabulary(
        tokens=tokens,
        spelling=Spelling.BYTE_LEVEL,
        special_ids=frozenset({shared.BYTE_BOS, shared.BYTE_EOS}),
        eos_ids=frozenset({shared.BYTE_EOS}),
        bos_id=shared.BYTE_BOS,
        chat_template=_TOY_TEMPLATE,
        template_variables={"bos_token": "<|begin|>", "eos_token": "<|end|>"},
    )


def gguf_vocabulary(file: GgufFile) -> TextVocabulary:
    """Of an open GGUF file."""
    tokens = file.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(ModelErrorReason.FILE_CORRUPT, f"{file.path} has no tokenizer.ggml.tokens")
    ids = shared.gguf_vocabulary(file)
    tokens = tokens[: ids.num_ids]  # without padding at the end, which the worker never samples either
    is_sentencepiece = file.text("tokenizer.ggml.model") == "llama"
    kinds = (file.numbers("tokenizer.ggml.token_type") or ())[: len(tokens)]
    adds_bos = file.flag("tokenizer.ggml.add_bos_token")
    if adds_bos is None:  # older files leave it out; these are the defaults of llama.cpp
        adds_bos = is_sentencepiece or file.text("tokenizer.ggml.pre") in LLAMA3_PRE
    adds_space = file.flag("tokenizer.ggml.add_space_prefix")
    return TextVocabulary(
        tokens=tokens,
        spelling=Spelling.SENTENCEPIECE if is_sentencepiece else Spelling.BYTE_LEVEL,
        special_ids=frozenset(token_id for token_id, kind in enumerate(kinds) if kind == CONTROL),
        eos_ids=ids.eos_ids,
        bos_id=ids.bos_id,
        adds_bos=adds_bos,
        strips_first_space=is_sentencepiece and adds_space is not False,
        chat_template=file.text(_GGUF_TEMPLATE),
        template_variables=_gguf_variables(file, tokens),
    )


def folder_vocabulary(
    files: ModelFiles, parsed: Mapping[str, object], ids: Mapping[str, int]
) -> TextVocabulary:
    """Of a folder. `parsed` is its tokenizer.json, `ids` the id of each token, added ones included."""
    tokens = [""] * (max(ids.values()) + 1)
    for token, token_id in ids.items():
        tokens[token_id] = token
    spelling, strips_first_space = _decoder(parsed.get("decoder"), files.location)
    known = shared.read_vocabulary(files)
    settings = _optional_json(files.location / "tokenizer_config.json")
    added = parsed.get("added_tokens")
    entries = added if isinstance(added, list) else []
    return TextVocabulary(
        tokens=tokens,
        spelling=spelling,
        special_ids=frozenset(int(entry["id"]) for entry in entries if entry.get("special")),
        eos_ids=known.eos_ids,
        bos_id=known.bos_id,
        adds_bos=_folder_adds_bos(settings, parsed, known.bos_id),
        strips_first_space=strips_first_space,
        chat_template=_folder_template(files.location, settings),
        template_variables=_folder_variables(settings),
    )


def _gguf_variables(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    found = {}
    for name, key in _TEMPLATE_IDS.items():
        token_id = file.integer(f"tokenizer.ggml.{key}")
        if token_id is not None and token_id < len(tokens):
            found[name] = tokens[token_id]
    return found


def _decoder(decoder: object, folder: Path) -> tuple[Spelling, bool]:
    """Spelling, and whether the first space is stripped. The `decoder` entry of tokenizer.json."""
    parts = decoder.get("decoders") if isinstance(decoder, dict) and "decoders" in decoder else [decoder]
    by_type = {str(part.get("type")): part for part in parts or [] if isinstance(part, dict)}
    kinds = set(by_type)
    if kinds == {"ByteLevel"}:
        return Spelling.BYTE_LEVEL, False
    replace, strip = by_type.get("Replace", {}), by_type.get("Strip")
    is_marked = replace.get("pattern") == {"String": "\u2581"} and replace.get("content") == " "
    is_one_space = strip is None or (strip.get("content"), strip.get("start"), strip.get("stop")) == (
        " ",
        1,
        0,
    )
    if kinds - {"Strip"} == {"Replace", "ByteFallback", "Fuse"} and is_marked and is_one_space:
        return Spelling.SENTENCEPIECE, strip is not None
    names = ", ".join(sorted(str(kind) for kind in kinds)) or "none"
    raise ModelError(
        ModelErrorReason.UNSUPPORTED_FEATURE,
        f"{folder / 'tokenizer.json'}: decoder {names} is not supported, only ByteLevel and SentencePiece's",
    )


def _folder_adds_bos(settings: Mapping[str, object], parsed: Mapping[str, object], bos: int | None) -> bool:
    """The explicit flag, else whether the template of tokenizer.json puts a special token in front."""
    flag = settings.get("add_bos_token")
    if bos is None or isinstance(flag, bool):
        return bos is not None and flag is True
    return any(_begins_special(part) for part in _processors(parsed.get("post_processor")))


def _processors(processor: object) -> list[Mapping[str, object]]:
    if not isinstance(processor, dict):
        return []
    nested = processor.get("processors")
    return [part for part in nested if isinstance(part, dict)] if isinstance(nested, list) else [processor]


def _begins_special(processor: Mapping[str, object]) -> bool:
    single = processor.get("single") if processor.get("type") == "TemplateProcessing" else None
    return isinstance(single, list) and bool(single) and "SpecialToken" in single[0]


def _folder_template(folder: Path, settings: Mapping[str, object]) -> str | None:
    """The file of its own first, then the entry of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = settings.get("chat_template") or _optional_json(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(template, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _folder_variables(settings: Mapping[str, object]) -> dict[str, str]:
    found = {}
    for name in _TEMPLATE_IDS:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _optional_json(path: Path) -> dict[str, object]:
    return shared.read_json(path) if path.is_file() else {}
