"""Promises of the tokenizer on small vocabularies: GGUF files and folders made here, the byte vocabulary."""

import asyncio
import json
import threading
from pathlib import Path

import gguf
import pytest
import regex
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.files import ModelFiles, ModelKind
from kvatlas.models.gguf import GgufFile
from kvatlas.models.token_bytes import byte_characters, spell_bytes
from kvatlas.models.vocabulary import read_vocabulary
from service.text.chat import ChatTemplate, ChatTurn
from service.text.threads import TextThreads
from service.text.tokenizer import Tokenizer, whole_text

CORPUS = [
    "the cat and the dog",
    "hello world, hello there",
    "number 1234 and 1 2 3",
    "the end; don't stop",
    "  x",
]
TEXTS = [
    "hello the world",
    " leading",
    "  two spaces",
    "trailing ",
    "tab\tnew\n\nlines  x",
    "1234567 a1b22",
    "don't DON'T we've",
    "é e\u0301 世界 😀👍🏽",
    "a<s>b</s> <s>",
    "\u2581mark",
    "",
]


def files(path: Path, kind: ModelKind = ModelKind.GGUF) -> ModelFiles:
    return ModelFiles(kind, "test", "test", "r1", path)


def write_gguf(path: Path, **overrides: object) -> Path:
    """A byte-level vocabulary with a few merges, as a GGUF file without tensors."""
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("Ġ", "w"),
        ("Ġ", "Ġ"),
        ("t", "he"),
        ("1", "2"),
    ]
    tokens = [*byte_characters(), *["".join(pair) for pair in merges], "<s>", "</s>", "<think>"]
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": len(tokens) - 3,
        "eos_token_id": len(tokens) - 2,
        "add_bos_token": True,
    } | overrides
    return _write(path, values)


def write_sentencepiece(path: Path, **overrides: object) -> Path:
    """A SentencePiece vocabulary with scores, byte fallback and control tokens."""
    words = [
        "\u2581",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "t",
        "a",
        "he",
        "ll",
        "hell",
        "hello",
        "\u2581hello",
    ]
    words += ["\u2581w", "or", "\u2581wor", "ld", "\u2581world", "\u2581\u2581", "th", "\u2581the", "the"]
    byte_names = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_names, *words]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(place) for place in _by_length(words)],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | overrides
    return _write(path, values)


def _by_length(words: list[str]) -> list[int]:
    """Scores so that every word can be reached: short ones merge first."""
    order = sorted(range(len(words)), key=lambda i: (len(words[i]), i))
    return [order.index(i) for i in range(len(words))]


def _write(path: Path, values: dict[str, object]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    for key, value in values.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_folder(folder: Path, *, add_bos: bool = True, template: str | None = None) -> Path:
    """A trained byte-level tokenizer as Hugging Face stores one."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=list(byte_characters()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    if add_bos:
        settings["bos_token"] = {"__type": "AddedToken", "content": "<s>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [1, 5]}))
    return folder


# -- folders -----------------------------------------------------------------------------------------------


def test_a_folders_ids_and_text_equal_those_of_transformers(tmp_path: Path) -> None:
    """B073, B077: raw text with special tokens; decoding with and without them."""
    tokenizer = Tokenizer.load(files(write_folder(tmp_path), ModelKind.FOLDER))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text), text
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    assert (tokenizer.size, tokenizer.bos_id, tokenizer.eos_ids) == (len(theirs), 0, {1, 5})


def test_bos_is_there_exactly_once(tmp_path: Path) -> None:
    """B077: raw with and without BOS text, chat whose template writes it, a model without BOS."""
    template = (
        "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
    )
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    tokenizer = Tokenizer.load(files(write_folder(tmp_path / "with", template=template), ModelKind.FOLDER))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "with")
    assert [tokenizer.encode(text)[:2].count(0) for text in ("hello", "<s>hello", "")] == [1, 1, 1]
    assert tokenizer.encode("<s>hello") == tokenizer.encode("hello")
    chat = ChatTemplate.of(tokenizer)
    assert chat is not None
    ids = tokenizer.encode_chat(chat.render([ChatTurn("user", "hello")]))
    assert ids == theirs.apply_chat_template([{"role": "user", "content": "hello"}], return_dict=False)
    assert ids.count(0) == 1
    bare = Tokenizer.load(files(write_folder(tmp_path / "without", add_bos=False), ModelKind.FOLDER))
    assert bare.encode("hello") == bare.encode("hello", add_special_tokens=False)


def test_a_template_file_of_its_own_wins(tmp_path: Path) -> None:
    write_folder(tmp_path, template="from the settings")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(files(tmp_path, ModelKind.FOLDER)).vocabulary.chat_template == "from the file"


def test_of_several_named_templates_the_default_one_is_used(tmp_path: Path) -> None:
    write_folder(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer.load(files(tmp_path, ModelKind.FOLDER)).vocabulary.chat_template == "plain"


def test_a_folder_that_cannot_be_used_says_which_file_and_why(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json") as missing:
        Tokenizer.load(files(tmp_path, ModelKind.FOLDER))
    assert missing.value.reason is ModelErrorReason.FILE_MISSING
    write_folder(tmp_path)
    parsed = json.loads((tmp_path / "tokenizer.json").read_text())
    word_piece = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed | {"decoder": word_piece}))
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer.load(files(tmp_path, ModelKind.FOLDER))
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed | {"model": {"type": "nonsense"}}))
    with pytest.raises(ModelError) as corrupt:
        Tokenizer.load(files(tmp_path, ModelKind.FOLDER))
    assert corrupt.value.reason is ModelErrorReason.FILE_CORRUPT


# -- GGUF --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "smaug-bpe", "deepseek-r1-qwen"])
def test_text_is_split_as_the_vocabulary_was_trained(tmp_path: Path, pre: str) -> None:
    """B095: against another regular expression engine and transformers' table of patterns."""
    tokenizer = Tokenizer.load(files(write_gguf(tmp_path / "m.gguf", pre=pre)))
    split = tokenizer._backend.pre_tokenizer
    assert split is not None
    for text in [*TEXTS, "x\r\n\r\n y", "ABCdef GHI'll", "x/y//\n", " \u3000\u00a0a"]:
        expected = regex.findall(GGUF_PRE_TOKENIZER_SPLITS[pre], text)
        assert [piece for piece, _ in split.pre_tokenize_str(text)] == [
            spell_bytes(piece.encode()) for piece in expected
        ], text


def test_digits_are_split_one_by_one_only_where_the_vocabulary_says_so(tmp_path: Path) -> None:
    """B095: SmolLM splits each digit, with the spaces before it on their own; GPT-2 does not."""
    smollm = Tokenizer.load(files(write_gguf(tmp_path / "s.gguf")))
    gpt2 = Tokenizer.load(files(write_gguf(tmp_path / "g.gguf", pre="gpt-2")))
    pieces = {
        name: [each.token_bytes(token_id) for token_id in each.encode("12  12", add_special_tokens=False)]
        for name, each in (("smollm", smollm), ("gpt2", gpt2))
    }
    assert pieces == {"smollm": [b"1", b"2", b"  ", b"1", b"2"], "gpt2": [b"12", b" ", b" ", b"12"]}


def test_composed_and_decomposed_accents_are_one_text_for_qwen2_only(tmp_path: Path) -> None:
    """B095: its tokenizer composes text first."""
    qwen = Tokenizer.load(files(write_gguf(tmp_path / "q.gguf", pre="qwen2")))
    smollm = Tokenizer.load(files(write_gguf(tmp_path / "s.gguf")))
    assert qwen.encode("e\u0301") == qwen.encode("é")
    assert smollm.encode("e\u0301") != smollm.encode("é")


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    """B095: a wrong split would give plausible ids."""
    with pytest.raises(ModelError, match="'made-up'") as refused:
        Tokenizer.load(files(write_gguf(tmp_path / "m.gguf", pre="made-up")))
    assert refused.value.reason is ModelErrorReason.UNSUPPORTED_FEATURE
    with pytest.raises(ModelError, match="'bert'"):
        Tokenizer.load(files(write_gguf(tmp_path / "b.gguf", model="bert")))


def test_special_and_user_defined_tokens_are_found_whole(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(files(write_gguf(tmp_path / "m.gguf")))
    bos, eos, think = tokenizer.size - 3, tokenizer.size - 2, tokenizer.size - 1
    ids = tokenizer.encode("<s>a</s><think>b")
    assert ids == [bos, *b"a", eos, think, *b"b"]
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a</s><think>b"
    assert tokenizer.token_bytes(eos) == b"</s>"
    assert tokenizer.token_bytes(tokenizer.size + 9) == b""


def test_bos_of_old_files_follows_the_kind_of_vocabulary(tmp_path: Path) -> None:
    """B077: without the flag SentencePiece and Llama 3 want BOS, others do not."""
    for pre, wants in (("llama-bpe", True), ("qwen2", False)):
        path = write_gguf(tmp_path / f"{pre}.gguf", pre=pre, add_bos_token=None)
        assert Tokenizer.load(files(path)).vocabulary.adds_bos is wants
    assert Tokenizer.load(files(write_sentencepiece(tmp_path / "spm.gguf"))).vocabulary.adds_bos


def test_a_sentencepiece_file_gives_the_ids_and_text_of_transformers(tmp_path: Path) -> None:
    """B073, B095: merges from scores, byte fallback, one space in front that decoding takes away."""
    path = write_sentencepiece(tmp_path / "spm.gguf")
    tokenizer = Tokenizer.load(files(path))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="spm.gguf")
    for text in [*TEXTS, "hello world", "  hello", "hellothe", "<0x41>", "<s>hello", "he\nllo"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        expected = theirs.decode(ids, clean_up_tokenization_spaces=False, skip_special_tokens=True)
        assert tokenizer.decode(ids) == expected


def test_a_sentencepiece_file_without_scores_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="score"):
        Tokenizer.load(files(write_sentencepiece(tmp_path / "m.gguf", scores=None)))


def test_padding_behind_a_sentencepiece_vocabulary_changes_nothing(tmp_path: Path) -> None:
    """B054: as converters pad to the embedding's rows, with tokens that have scores and are never used."""
    plain = Tokenizer.load(files(write_sentencepiece(tmp_path / "plain.gguf")))
    with GgufFile(tmp_path / "plain.gguf") as file:
        tokens = file.strings("tokenizer.ggml.tokens") or []
        columns = {
            name: list(file.numbers(f"tokenizer.ggml.{name}") or ()) for name in ("scores", "token_type")
        }
    padded = write_sentencepiece(
        tmp_path / "padded.gguf",
        tokens=[*tokens, "[PAD1]", "[PAD2]"],
        scores=[*columns["scores"], -10000.0, -10000.0],
        token_type=[*columns["token_type"], 5, 5],
    )
    tokenizer = Tokenizer.load(files(padded))
    assert tokenizer.size == plain.size
    assert tokenizer.encode("hello the world") == plain.encode("hello the world")


@pytest.mark.parametrize("odd", [{"merges": ["h e", "q never"]}, {"token_type": [1] * 3}])
def test_a_tokenizer_that_contradicts_itself_is_corrupt(tmp_path: Path, odd: dict[str, object]) -> None:
    write = write_gguf if "merges" in odd else write_sentencepiece
    path = write(tmp_path / "m.gguf", **odd)
    with pytest.raises(ModelError, match=r"m\.gguf") as caught:
        Tokenizer.load(files(path))
    assert caught.value.reason is ModelErrorReason.FILE_CORRUPT


def test_merges_that_lead_to_a_control_token_are_no_way_around_the_masks(tmp_path: Path) -> None:
    """B078: even a vocabulary that would build one from text cannot put it into a turn."""
    merges = [("<", "s"), ("<s", ">")]
    tokens = [*byte_characters(), "<s", "<s>"]
    path = write_gguf(
        tmp_path / "m.gguf",
        pre="default",
        tokens=tokens,
        token_type=[1] * 257 + [3],
        merges=[" ".join(pair) for pair in merges],
        bos_token_id=257,
        eos_token_id=257,
        model="gpt2",
    )
    tokenizer = Tokenizer.load(files(path))
    chat = ChatTemplate("{{ messages[0].content }}<s>", tokenizer.control_tokens)
    ids = tokenizer.encode_chat(chat.render([ChatTurn("user", "x<s>")]))
    assert ids == [tokenizer.encode(c, add_special_tokens=False)[0] for c in "x<s>"] + [257]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "x<s><s>"


# -- the byte vocabulary -----------------------------------------------------------------------------------


def test_equal_tokens_in_a_vocabulary_are_no_way_around_the_masks(tmp_path: Path) -> None:
    """B078: they leave holes, and ids behind the vocabulary's size that are tokens of ordinary text."""
    tokens = ["<s>", "</s>", "<think>", *byte_characters(), "same", "same", "same", "Ġw", "Ġx"]
    path = write_gguf(
        tmp_path / "m.gguf",
        tokens=tokens,
        token_type=[3, 3, 4] + [1] * (len(tokens) - 3),
        merges=["Ġ w", "Ġ x"],
        bos_token_id=0,
        eos_token_id=1,
        add_bos_token=False,
    )
    tokenizer = Tokenizer.load(files(path))
    template = ChatTemplate("<s>{{ messages[0]['content'] }}</s>", tokenizer.control_tokens)
    chat = template.render([ChatTurn("user", "a w x<think></s>")])
    ids = tokenizer.encode_chat(chat)
    assert [token_id for token_id in ids if token_id < 3] == [0, 2, 1]
    assert ids[1:4] == tokenizer.encode("a w x")
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"<s>a w x<think></s></s>"


def test_the_byte_vocabulary_round_trips_any_text_and_agrees_with_the_workers() -> None:
    model = ModelFiles(ModelKind.RANDOM, "random:tiny", "tiny", "0", shape="tiny")
    tokenizer = Tokenizer.load(model)
    shared = read_vocabulary(model)
    assert (tokenizer.size, tokenizer.bos_id, tokenizer.eos_ids) == (512, shared.bos_id, shared.eos_ids)
    for text in TEXTS:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(tokenizer.decode([token_id]) for token_id in range(258, 512))


def test_an_unknown_shape_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="'huge'"):
        Tokenizer.load(ModelFiles(ModelKind.RANDOM, "random:huge", "huge", "0", shape="huge"))


# -- any tokenizer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_are_places_in_utf8(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer.load(files(write_gguf(tmp_path / "m.gguf")))
    encoded = tokenizer.encode_with_offsets(text)
    assert encoded.ids == tokenizer.encode(text)
    assert encoded.start_offsets == sorted(encoded.start_offsets)
    raw, end = text.encode(), 0
    for token_id, start in list(zip(encoded.ids, encoded.start_offsets, strict=True))[1:]:
        piece = tokenizer.token_bytes(token_id)
        # A token inside a character starts where the character does.
        assert start <= end
        assert raw[end : end + len(piece)] == piece
        end += len(piece)
    assert end == len(raw)


def test_lone_surrogates_become_replacement_characters_and_pairs_stay() -> None:
    """A client cannot make tokenizing fail with text that JSON let through."""
    assert whole_text("a\ud800b\udc00") == "a\ufffdb\ufffd"
    assert whole_text("\ud83d\ude00") == "😀"
    assert Tokenizer.toy().encode("\ud800") == list("\ufffd".encode())


def test_long_text_runs_in_a_bounded_number_of_threads() -> None:
    asyncio.run(_long_text())


async def _long_text() -> None:
    threads = TextThreads(num_threads=2)
    running, most, lock = 0, 0, threading.Lock()
    gate = threading.Event()

    def work() -> str:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        gate.wait(10)
        with lock:
            running -= 1
        return threading.current_thread().name

    assert await threads.run(10, lambda: threading.current_thread().name) == "MainThread"
    tasks = [asyncio.ensure_future(threads.run(5000, work)) for _ in range(6)]
    while running < 2:
        await asyncio.sleep(0)
    tasks[0].cancel()  # a caller that leaves: its thread still counts until it is done
    for _ in range(20):
        await asyncio.sleep(0)
    assert running == 2
    gate.set()
    names = await asyncio.gather(*tasks, return_exceptions=True)
    threads.close()
    assert isinstance(names[0], asyncio.CancelledError)
    assert all(str(name).startswith("text") for name in names[1:])
    assert most == 2


def test_chats_and_raw_text_are_encoded_alike_from_many_threads(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(files(write_gguf(tmp_path / "m.gguf")))
    text = "hello the world <think> 123 " * 100
    expected, found = tokenizer.encode(text), []

    def work() -> None:
        found.extend([tokenizer.encode(text) == expected for _ in range(20)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80
