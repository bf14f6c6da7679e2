"""Builds the `tokenizers` object that splits text and merges pieces, from a model's files.

Owns what each pre-tokenizer name of a GGUF file means; a name that is not known here is refused,
since a wrong split gives plausible ids that the model was not trained on.
"""

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.gguf import GgufFile
from kvatlas.models.text_vocabulary import LLAMA3_PRE, NORMAL, USER_DEFINED, TextVocabulary
from kvatlas.models.token_bytes import Spelling

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    rf"|{_LINES_AND_SPACES}"
)
_QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    rf"|{_LINES_AND_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# What llama.cpp does for files whose converter did not know the model.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

_SPLITS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(LLAMA3_PRE, (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_QWEN2,)),
    # Digits one by one, then as GPT-2: a run of spaces before a digit stays whole.
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), (_GPT2,)),
    "tekken": (_TEKKEN,),
    "default": _DEFAULT,
}
_COMPOSED = ("qwen2", "deepseek-r1-qwen", "megrez", "command-r")
"""Text is put in Unicode's composed form first: the tokenizer.json of these families says so."""
_WHOLE_WORDS = (*LLAMA3_PRE, "tekken")
"""A word that is a token is taken whole, even where no chain of merges leads to it."""


def toy_backend(vocabulary: TextVocabulary) -> Tokenizer:
    """Bytes and special tokens, no merges."""
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens[:256])}
    ids |= {vocabulary.tokens[token_id]: token_id for token_id in vocabulary.special_ids}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    _add_whole_tokens(backend, vocabulary, ())
    return backend


def gguf_backend(file: GgufFile, vocabulary: TextVocabulary) -> Tokenizer:
    """From the metadata of an open GGUF file."""
    model = file.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ModelError(
            ModelErrorReason.UNSUPPORTED_FEATURE,
            f"{file.path}: tokenizer {model!r} is not supported, only 'gpt2' (byte-level BPE) and 'llama'",
        )
    kinds = (file.numbers("tokenizer.ggml.token_type") or ())[: len(vocabulary.tokens)]
    build = _byte_level if vocabulary.spelling is Spelling.BYTE_LEVEL else _sentencepiece
    try:
        backend = build(file, vocabulary, [int(kind) for kind in kinds])
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception, of a merge without its token for one
        raise ModelError(ModelErrorReason.FILE_CORRUPT, f"{file.path}: {error}") from error
    _add_whole_tokens(backend, vocabulary, [i for i, kind in enumerate(kinds) if kind == USER_DEFINED])
    return backend


def _byte_level(file: GgufFile, vocabulary: TextVocabulary, kinds: Sequence[int]) -> Tokenizer:
    pre = file.text("tokenizer.ggml.pre") or "default"
    if pre not in _SPLITS:
        raise ModelError(
            ModelErrorReason.UNSUPPORTED_FEATURE,
            f"{file.path}: pre-tokenizer {pre!r} is not known; known: {', '.join(sorted(_SPLITS))}",
        )
    merges = [_pair(merge) for merge in file.strings("tokenizer.ggml.merges") or []]
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *[pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[pre]],
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


def _sentencepiece(file: GgufFile, vocabulary: TextVocabulary, kinds: Sequence[int]) -> Tokenizer:
    scores = file.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) < len(vocabulary.tokens):  # padding at the end has scores, too
        raise ModelError(ModelErrorReason.FILE_CORRUPT, f"{file.path} has no score for each token")
    merges = _merges_from_scores(vocabulary.tokens, scores, kinds)
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.template_variables.get("unk_token")
    backend = Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    scheme = "first" if vocabulary.strips_first_space else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=False)
    return backend


def _merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """The merges that SentencePiece's rule implies: the pair whose whole scores best goes first.

    Only tokens that text may become take part, so no merge makes a control token or a byte's name.
    """
    ids = {token: i for i, token in enumerate(tokens) if not kinds or kinds[i] in (NORMAL, USER_DEFINED)}
    ranked: list[tuple[float, int, tuple[str, str]]] = []
    for token, token_id in ids.items():
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in ids and right in ids:
                ranked.append((-scores[token_id], -place, (left, right)))
    ranked.sort()
    return [pair for _, _, pair in ranked]


def _add_whole_tokens(backend: Tokenizer, vocabulary: TextVocabulary, shown_ids: Sequence[int]) -> None:
    """Tokens that are found whole in text before anything is split."""
    tokens = vocabulary.tokens
    special = [AddedToken(tokens[i], normalized=False, special=True) for i in sorted(vocabulary.special_ids)]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(tokens[token_id], normalized=False) for token_id in shown_ids])


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
