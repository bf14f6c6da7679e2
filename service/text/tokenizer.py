"""Text -> token ids from the model's own files, and what each id is in bytes.

Owns the `tokenizers` objects. Ids equal those of the Hugging Face tokenizer of the same model; the
one difference is on purpose: BOS is put in front of raw text once, also where the text has it.
Special tokens in raw text are recognised, since whoever sends raw text renders it himself; those in
the turns of a chat are text (`control_tokens.py`). Encoding is safe from several threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import tokenizers
from tokenizers import AddedToken

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.files import ModelFiles, ModelKind
from kvatlas.models.gguf import GgufFile
from kvatlas.models.text_vocabulary import (
    TextVocabulary,
    folder_vocabulary,
    gguf_vocabulary,
    toy_size,
    toy_vocabulary,
)
from kvatlas.models.token_bytes import token_bytes, without
from kvatlas.models.vocabulary import read_json
from service.text import backend as backends
from service.text.control_tokens import ControlTokens
from service.text.detokenizer import Detokenizer
from service.text.threads import INLINE_BYTES

_FILLER = "\U0010fffefiller "


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a text, with their places in it where these were asked for."""

    ids: list[int]
    start_offsets: Sequence[int] = ()  # in UTF-8 bytes of the text; one inside a character starts with it


@dataclass(frozen=True, slots=True)
class ChatText:
    """A rendered chat. `marked` has the template's control tokens as marks; None: nothing to tell apart."""

    text: str
    marked: str | None = None


class Tokenizer:
    """One model's tokenizer. Immutable after construction."""

    def __init__(self, backend: tokenizers.Tokenizer, vocabulary: TextVocabulary) -> None:
        self.vocabulary = vocabulary
        self._backend = backend
        self._all_bytes = token_bytes(vocabulary.tokens, vocabulary.spelling)
        self._shown_bytes = without(self._all_bytes, vocabulary.special_ids)

    @classmethod
    def load(cls, files: ModelFiles) -> "Tokenizer":
        """Reads a model's files. Raises ModelError naming what is missing or not supported."""
        match files.kind:
            case ModelKind.GGUF:
                with GgufFile(files.location) as file:
                    vocabulary = gguf_vocabulary(file)
                    return cls(backends.gguf_backend(file, vocabulary), vocabulary)
            case ModelKind.FOLDER:
                return cls._load_folder(files)
            case ModelKind.RANDOM:
                return cls.toy(toy_size(files))

    @classmethod
    def toy(cls, size: int = 512) -> "Tokenizer":
        """The byte vocabulary of random models."""
        vocabulary = toy_vocabulary(size)
        return cls(backends.toy_backend(vocabulary), vocabulary)

    @classmethod
    def _load_folder(cls, files: ModelFiles) -> "Tokenizer":
        path = files.location / "tokenizer.json"
        parsed = read_json(path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(ModelErrorReason.FILE_CORRUPT, f"{path}: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, folder_vocabulary(files, parsed, backend.get_vocab(with_added_tokens=True)))

    # -- what there is ------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Ids that mean something are below this; the model's output layer may be wider."""
        return len(self._all_bytes)

    @property
    def bos_id(self) -> int | None:
        """Beginning of a text, where the model has one."""
        return self.vocabulary.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Any of them ends a sequence."""
        return self.vocabulary.eos_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, special ones included; may be a part of a character."""
        return self._all_bytes[token_id] if token_id < len(self._all_bytes) else b""

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The texts that only a chat template may turn into special tokens."""
        return ControlTokens(self.vocabulary.tokens[token_id] for token_id in self.vocabulary.special_ids)

    # -- text -> ids --------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of raw text; with special tokens BOS is in front exactly once, if the model wants one."""
        return self._with_bos(self._run(self._backend, whole_text(text)), add_special_tokens)

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool = True) -> Encoded:
        """The same with the place of each token; BOS that was put in front is at 0."""
        text = whole_text(text)
        encoding = self._backend.encode_batch([text], add_special_tokens=False)[0]
        ids = self._with_bos(encoding.ids, add_special_tokens)
        starts = _byte_offsets(text, _starts(encoding))
        return Encoded(ids, [0] * (len(ids) - len(starts)) + starts)

    def encode_chat(self, chat: ChatText, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a rendered chat. What the template writes is what the model gets: it writes BOS itself."""
        if chat.marked is None:
            return self.encode(chat.text, add_special_tokens=add_special_tokens)
        ids = self._from_marks(self._run(self._marking, chat.marked))
        return self._with_bos(ids, add_special_tokens)

    def encode_chat_with_offsets(self, chat: ChatText, *, add_special_tokens: bool = False) -> Encoded:
        """The same with the place of each token in `chat.text`."""
        if chat.marked is None:
            return self.encode_with_offsets(chat.text, add_special_tokens=add_special_tokens)
        encoding = self._marking.encode_batch([chat.marked], add_special_tokens=False)[0]
        starts = _starts(encoding)
        pieces = [self._from_marks([token_id]) for token_id in encoding.ids]
        ids = self._with_bos([token_id for piece in pieces for token_id in piece], add_special_tokens)
        places = [start for start, piece in zip(starts, pieces, strict=True) for _ in piece]
        widths = {mark: text for text, mark in self.control_tokens.marks.items()}
        offsets = _byte_offsets(chat.marked, places, widths)
        return Encoded(ids, [0] * (len(ids) - len(offsets)) + offsets)

    # -- ids -> text --------------------------------------------------------------------------------

    def detokenizer(self, *, skip_special_tokens: bool = True, begins_text: bool = True) -> Detokenizer:
        """A new state for one sequence. `begins_text` false: its text goes on where another one ends."""
        table = self._shown_bytes if skip_special_tokens else self._all_bytes
        return Detokenizer(table, strip_space=begins_text and self.vocabulary.strips_first_space)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """All at once; equals what a detokenizer gives piece by piece."""
        state = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return state.push(token_ids) + state.finish()

    # -- inside -------------------------------------------------------------------------------------

    @staticmethod
    def _run(backend: tokenizers.Tokenizer, text: str) -> list[int]:
        if len(text) <= INLINE_BYTES:
            return backend.encode(text, add_special_tokens=False).ids
        # The batch call lets go of the interpreter; the other one holds it while it builds offsets.
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _with_bos(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        bos = self.vocabulary.bos_id
        if not add_special_tokens or not self.vocabulary.adds_bos or bos is None or ids[:1] == [bos]:
            return ids
        return [bos, *ids]

    @cached_property
    def _marking(self) -> tokenizers.Tokenizer:
        """The same tokenizer, sharing the model, that knows control tokens only by their marks."""
        marking = tokenizers.Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            marking.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            marking.pre_tokenizer = self._backend.pre_tokenizer
        # Ids of new tokens begin at the vocabulary's size. With holes in it, as equal tokens leave them,
        # those would be ids of other tokens: fillers that no text holds take them first.
        known = self._backend.get_vocab(with_added_tokens=False)
        num_holes = max(known.values(), default=-1) + 1 - len(known)
        marking.add_tokens(
            [AddedToken(f"{_FILLER}{number}", normalized=False) for number in range(num_holes)]
        )
        added = sorted(self._backend.get_added_tokens_decoder().items())
        for token_id, token in added:
            content = self.control_tokens.marks[token.content] if token.special else token.content
            marking.add_tokens([_renamed(token, content, is_special=token_id in self.vocabulary.special_ids)])
        return marking

    @cached_property
    def _id_of_added(self) -> dict[int, int]:
        """The marking tokenizer's ids of added tokens -> the model's."""
        by_text = {token.content: i for i, token in self._backend.get_added_tokens_decoder().items()}
        texts = {mark: text for text, mark in self.control_tokens.marks.items()}
        added = {i: token.content for i, token in self._marking.get_added_tokens_decoder().items()}
        return {
            i: by_text[texts.get(text, text)] for i, text in added.items() if not text.startswith(_FILLER)
        }

    def _from_marks(self, ids: Sequence[int]) -> list[int]:
        ours, special = self._id_of_added, self.vocabulary.special_ids
        found: list[int] = []
        for token_id in ids:
            if token_id in ours:
                found.append(ours[token_id])
            elif token_id in special:  # a vocabulary whose merges lead to a control token
                found.extend(self._spelled_out(token_id))
            else:
                found.append(token_id)
        return found

    def _spelled_out(self, token_id: int) -> list[int]:
        """A control token's text as ordinary tokens, character by character."""
        characters = self.vocabulary.tokens[token_id]
        ids = [token.id for character in characters for token in self._backend.model.tokenize(character)]
        return [each for each in ids if each not in self.vocabulary.special_ids]


def whole_text(text: str) -> str:
    """Text that can be UTF-8: lone surrogates, which JSON can smuggle in, become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _renamed(token: AddedToken, content: str, *, is_special: bool) -> AddedToken:
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and not is_special,
        special=is_special,
    )


def _starts(encoding: tokenizers.Encoding) -> list[int]:
    """Where each token begins, in characters.

    Token by token: `offsets` of a text of 2 MiB keeps the interpreter for half a second, all at once, and
    takes twice as long.
    """
    starts = []
    for number in range(len(encoding)):
        place = encoding.token_to_chars(number)
        assert place is not None, f"token {number} is no part of the text"
        starts.append(place[0])
    return starts


def _byte_offsets(text: str, starts: Sequence[int], widths: dict[str, str] | None = None) -> list[int]:
    """Character offsets -> UTF-8 byte offsets. `widths`: characters that stand for another text."""
    widths = widths or {}
    if text.isascii():
        return list(starts)
    offsets, total = [], 0
    for character in text:
        offsets.append(total)
        total += len(widths.get(character, character).encode())
    offsets.append(total)
    return [offsets[start] for start in starts]
