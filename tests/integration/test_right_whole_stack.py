"""Greedy answers through client, service, seam, worker and back equal those of Hugging Face transformers.

The answers of transformers (fp32, the same GGUF weights) are in tests/golden/right.json, made and proven by
tests/golden/test_right_oracle.py. Compared are prompts whose best and second logit are more than 1e-3 apart
at every step; today that is all 20.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvatlas.v1 import cache_pb2, cache_pb2_grpc, generation_pb2, generation_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
MIN_GAP = 1e-3
EOS = 2
AT_ONCE = 16
ANSWER_SECONDS = 300.0

Entry = dict[str, Any]


def entries(names: Sequence[str] = ()) -> list[Entry]:
    """Prompts that can be compared, all of them or those named."""
    golden = json.loads((ROOT / "tests" / "golden" / "right.json").read_text())["prompts"]
    return [e for e in golden if e["smallest_gap"] > MIN_GAP and (not names or e["name"] in names)]


class Stack:
    """A service with one worker, as a client sees them."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self._cache = cache_pb2_grpc.CacheServiceStub(channel)

    def ask(self, entry: Entry, salt: str, max_tokens: int) -> generation_pb2.GenerateResponse:
        request = generation_pb2.GenerateRequest()
        fill_prompt(request.spec, entry)
        request.spec.sampling.temperature = 0
        request.spec.stop.max_tokens = max_tokens
        request.spec.output.format = generation_pb2.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
        request.spec.cache.salt = salt
        response: generation_pb2.GenerateResponse = self._generation.Generate(request, timeout=ANSWER_SECONDS)
        return response

    def prompt_ids(self, entry: Entry) -> list[int]:
        request = generation_pb2.TokenizeRequest()
        fill_prompt(request, entry)
        return list(self._generation.Tokenize(request, timeout=30).token_ids)

    def active_pages(self) -> int:
        pool = self._cache.GetPagePool(cache_pb2.GetPagePoolRequest(), timeout=30)
        return int(pool.stats.active_pages)


def fill_prompt(message: Any, entry: Entry) -> None:
    """Text, chat or ids, as the entry has it."""
    roles = generation_pb2.ChatRole
    if "chat" in entry:
        for turn in entry["chat"]:
            role = roles.Value(f"CHAT_ROLE_{turn['role'].upper()}")
            message.chat.messages.add(role=role, content=turn["content"])
    elif "token_ids" in entry:
        message.token_ids.ids.extend(entry["token_ids"])
    else:
        message.text = entry["text"]


def check_prompts(stack: Stack, asked: Sequence[Entry]) -> None:
    """Text and chats become the ids that transformers makes of them."""
    for entry in asked:
        if "token_ids" not in entry:
            assert stack.prompt_ids(entry) == entry["prompt_ids"], entry["name"]


def without_eos(tokens: Sequence[int]) -> list[int]:
    return [token for token in tokens if token != EOS]


def check(entry: Entry, answer: generation_pb2.GenerateResponse, max_tokens: int) -> None:
    """The answer is the oracle's, as far as it was asked for."""
    wanted = entry["tokens"][:max_tokens]
    is_ended = wanted[-1] == EOS
    choice = answer.choices[0]
    assert answer.usage.prompt_tokens == len(entry["prompt_ids"]), entry["name"]
    assert without_eos(choice.token_ids) == without_eos(wanted), entry["name"]
    reason = generation_pb2.FINISH_REASON_EOS if is_ended else generation_pb2.FINISH_REASON_MAX_TOKENS
    assert choice.finish_reason == reason, entry["name"]


def check_all(stack: Stack, asked: Sequence[Entry], page_size: int, max_tokens: int) -> None:
    """Cold and warm; alone, each with a salt of its own, and all at once, sharing what they can."""
    for at_once in (1, AT_ONCE):
        salts = [f"right-{entry['name'] if at_once == 1 else 'together'}" for entry in asked]
        for is_warm in (False, True):
            with ThreadPoolExecutor(at_once) as pool:
                answers = list(pool.map(stack.ask, asked, salts, [max_tokens] * len(asked)))
            for entry, answer in zip(asked, answers, strict=True):
                check(entry, answer, max_tokens)
                hit = answer.usage.prefix.hit_tokens
                if is_warm:
                    assert hit == (len(entry["prompt_ids"]) - 1) // page_size * page_size, entry["name"]
                elif at_once == 1:
                    assert hit == 0, entry["name"]


@pytest.mark.model
def test_answers_equal_those_of_transformers(real_server: Any, wait_until: Callable[..., None]) -> None:
    """A fast part of the whole comparison: short prompts, first tokens."""
    asked = entries(["one-token", "hello-chat", "emoji-raw", "turns"])
    with grpc.insecure_channel(real_server.address) as channel:
        stack = Stack(channel)
        check_prompts(stack, asked)
        check_all(stack, asked, page_size=16, max_tokens=8)
        wait_until(lambda: stack.active_pages() == 0, "an idle pool")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("page_size", "chunk"), list(itertools.product([1, 16, 64], [7, 512])))
def test_every_answer_equals_transformers(
    model_path: Path,
    start_server: Callable[..., Any],
    wait_until: Callable[..., None],
    page_size: int,
    chunk: int,
) -> None:
    """All prompts in full: 1 to 1,500 tokens, cold and warm, alone and 16 at once.

    A step of 7 tokens has room for 6 running sequences; of 16 at once, the others wait.
    """
    asked = entries()
    assert len(asked) >= 18
    server = start_server(
        *("--model", str(model_path), "--page-size", str(page_size), "--num-pages", str(32_768 // page_size)),
        *("--max-running", str(min(AT_ONCE, chunk - 1)), "--set-worker", f"max_batch_tokens={chunk}"),
        *("--set-worker", "max_context=2048", "--set-worker", "debug=on", "--set-worker", "debug_poison=on"),
    )
    with grpc.insecure_channel(server.address) as channel:
        stack = Stack(channel)
        check_prompts(stack, asked)
        check_all(stack, asked, page_size, max_tokens=48)
        wait_until(lambda: stack.active_pages() == 0, "an idle pool")
