"""Tokenize and Detokenize beside generations: who waits for whom, how many there may be, what is computed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc
from service.testing import Refusal, RunningService, running_service
from tests.held_tokenizer import HELD, HeldTokenizer

CALL_SECONDS = 60.0  # ends a call that hangs
LONG = "x" * 1500  # is tokenized in a thread, and detokenized


@pytest.fixture
def tokenizer() -> HeldTokenizer:
    return HeldTokenizer.toy()


@pytest.fixture
def running(tmp_path: Path, tokenizer: HeldTokenizer) -> Iterator[RunningService]:
    with running_service(tmp_path, tokenizer=tokenizer) as service:
        yield service
        tokenizer.go_on.set()


@pytest.fixture
def stub(running: RunningService) -> Iterator[Any]:
    with grpc.insecure_channel(running.address) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def test_a_generation_does_not_wait_for_texts_that_are_only_tokenized(
    stub: Any, tokenizer: HeldTokenizer, wait_until: Any
) -> None:
    """Two long ones had both threads, and more of them were before every longer prompt of anybody."""
    calls = [stub.Tokenize.future(pb.TokenizeRequest(text=HELD), timeout=CALL_SECONDS) for _ in range(4)]
    wait_until(lambda: tokenizer.num_held > 0, "a text that takes long")
    spec = pb.GenerationSpec(text=LONG, stop={"max_tokens": 1})
    response = stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
    assert response.usage.prompt_tokens == len(LONG)
    assert tokenizer.num_held == 1, "the others wait for it"
    tokenizer.go_on.set()
    assert {call.result().token_count for call in calls} == {len(HELD)}


def test_there_are_so_many_such_calls_in_a_process_and_a_place_comes_back(
    stub: Any, running: RunningService, tokenizer: HeldTokenizer, wait_until: Any
) -> None:
    """Each that waits holds its message, and nothing counted them."""
    backstage = running.service.backstage
    backstage.text_calls.max_calls = 2
    waiting = stub.Tokenize.future(pb.TokenizeRequest(text=HELD), timeout=CALL_SECONDS)
    leaving = stub.Tokenize.future(pb.TokenizeRequest(text=HELD), timeout=CALL_SECONDS)
    wait_until(lambda: backstage.text_calls.active == 2, "two calls")
    for call in (
        lambda: stub.Tokenize(pb.TokenizeRequest(text="short"), timeout=CALL_SECONDS),
        lambda: stub.Detokenize(pb.DetokenizeRequest(token_ids=[65]), timeout=CALL_SECONDS),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            call()
        refusal = Refusal.of(raised.value)
        assert (refusal.code, refusal.reason) == ("UNAVAILABLE", "QUEUE_FULL")
    leaving.cancel()
    wait_until(lambda: backstage.text_calls.active == 1, "the place of one that left")
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=[65]), timeout=CALL_SECONDS).text == "A"
    tokenizer.go_on.set()
    assert waiting.result().token_count == len(HELD)
    wait_until(lambda: backstage.text_calls.active == 0, "the places of all")


def test_offsets_are_made_only_where_they_are_asked_for(stub: Any, tokenizer: HeldTokenizer) -> None:
    """They are most of the work, and were thrown away."""
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=LONG)])
    for request in (pb.TokenizeRequest(text=LONG), pb.TokenizeRequest(chat=chat)):
        tokenizer.num_placed = 0
        plain = stub.Tokenize(request, timeout=CALL_SECONDS)
        assert (len(plain.start_offsets), tokenizer.num_placed) == (0, 0)
        request.include_offsets = True
        placed = stub.Tokenize(request, timeout=CALL_SECONDS)
        assert placed.token_ids == plain.token_ids
        assert len(placed.start_offsets) == len(placed.token_ids) >= len(LONG)


def test_an_id_that_is_none_is_refused_however_many_there_are(stub: Any) -> None:
    for count in (1, 100_000):
        ids = [65] * (count - 1) + [1 << 30]
        with pytest.raises(grpc.RpcError) as raised:
            stub.Detokenize(pb.DetokenizeRequest(token_ids=ids), timeout=CALL_SECONDS)
        assert Refusal.of(raised.value).paths == ("token_ids",)
    text = stub.Detokenize(pb.DetokenizeRequest(token_ids=[65, 66] * 50_000), timeout=CALL_SECONDS).text
    assert text == "AB" * 50_000


def test_a_prompt_of_far_too_many_ids_is_refused_before_they_are_looked_at(stub: Any) -> None:
    """A message holds millions of them: the event loop stood still for a quarter of a second."""
    spec = pb.GenerationSpec(token_ids={"ids": [1 << 30] * 100_000})
    with pytest.raises(grpc.RpcError) as raised:
        stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
    refusal = Refusal.of(raised.value)
    assert (refusal.reason, refusal.metadata["prompt_tokens"]) == ("PROMPT_TOO_LONG", "100000")
    begun = pb.StreamGenerateRequest(spec={"text": "x"}, resume_after=spec.token_ids)
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.StreamGenerate(begun, timeout=CALL_SECONDS))
    assert Refusal.of(raised.value).paths == ("resume_after",)
