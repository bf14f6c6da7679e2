"""Answers with many log-probabilities: in messages that fit, beside the loop, or refused in words."""

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc
from service.handlers import convert, sizes
from service.testing import Refusal, RunningService, running_service
from service.testing_worker import WorkerScript

CALL_SECONDS = 120.0  # ends a call that hangs
ALTERNATIVES = 20


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("large"), script=WorkerScript(step_ms=0)) as service:
        yield service


@pytest.fixture(scope="module")
def stub(running: RunningService) -> Iterator[Any]:
    with grpc.insecure_channel(running.address) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def spec_of(text: str, max_tokens: int, **output: int) -> pb.GenerationSpec:
    stop = pb.StopCriteria(max_tokens=max_tokens)
    return pb.GenerationSpec(text=text, stop=stop, output=pb.OutputOptions(**output))


def refused(call: Any) -> Refusal:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return Refusal.of(raised.value)


def test_an_answer_larger_than_a_message_is_refused_as_soon_as_that_is_known(
    stub: Any, running: RunningService, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    """gRPC's core refused it at the end, with a status that says: try again."""
    monkeypatch.setattr(sizes, "MAX_ANSWER_BYTES", 20_000)
    running.worker.aborts.clear()
    spec = spec_of("abcd", 400, logprobs=ALTERNATIVES)
    spec.labels["fake.hold_at"] = "300"  # the worker never comes to the end
    refusal = refused(lambda: stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS))
    assert (refusal.code, refusal.reason, refusal.paths) == (
        "INVALID_ARGUMENT",
        "INVALID_FIELD",
        ("spec.output",),
    )
    assert "20000 bytes" in refusal.message
    assert "StreamGenerate" in refusal.message
    wait_until(lambda: running.is_idle, "its end on the worker")
    assert running.worker.aborts
    assert (
        stub.Generate(pb.GenerateRequest(spec=spec_of("ab", 3)), timeout=CALL_SECONDS).choices[0].text
        == "aba"
    )


def test_a_prompt_whose_scores_never_fit_is_refused_before_it_runs(
    stub: Any, running: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "MAX_ANSWER_BYTES", 20_000)
    before = len(running.worker.adds)
    spec = spec_of("x" * 300, 2, prompt_logprobs=ALTERNATIVES)
    for call in (
        lambda: stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS),
        lambda: list(stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=CALL_SECONDS)),
    ):
        refusal = refused(call)
        assert (refusal.reason, refusal.paths) == ("INVALID_FIELD", ("spec.output.prompt_logprobs",))
        assert "300 tokens" in refusal.message
    assert len(running.worker.adds) == before


def test_a_prompts_scores_that_turn_out_too_large_are_refused_in_words(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a token's bytes add is known at the end only."""
    spec = spec_of("x" * 100, 2, prompt_logprobs=ALTERNATIVES)
    size = stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS).ByteSize()
    monkeypatch.setattr(sizes, "MAX_ANSWER_BYTES", size - 200)
    for call in (
        lambda: stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS),
        lambda: list(stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=CALL_SECONDS)),
    ):
        assert refused(call).paths == ("spec.output",)


def test_the_scores_of_a_long_prompt_are_written_beside_the_loop(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """66 us a token with 20 alternatives: a prompt of 8,000 stood in every stream's way for half a second."""
    threads: list[str] = []
    write = convert.to_logprobs

    def writing(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return write(*arguments)

    monkeypatch.setattr(convert, "to_logprobs", writing)
    spec = spec_of("x" * 300, 2, prompt_logprobs=ALTERNATIVES)
    assert len(stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS).prompt_logprobs) == 300
    list(stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=CALL_SECONDS))
    assert [name.partition("_")[0] for name in threads] == ["text", "text"]


def test_tokens_and_texts_larger_than_a_message_are_refused_in_words(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's core refused them, with no reason, and the access log said OK."""
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="x" * 900)])
    calls = {
        "text": lambda: stub.Tokenize(pb.TokenizeRequest(text="x" * 900), timeout=CALL_SECONDS),
        "chat": lambda: stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=CALL_SECONDS),
        "token_ids": lambda: stub.Detokenize(
            pb.DetokenizeRequest(token_ids=[ord("x")] * 2_000), timeout=CALL_SECONDS
        ),
    }
    largest = {path: call().ByteSize() for path, call in calls.items()}
    for path, call in calls.items():
        monkeypatch.setattr(sizes, "MAX_ANSWER_BYTES", largest[path])
        assert call().ByteSize() == largest[path]
        monkeypatch.setattr(sizes, "MAX_ANSWER_BYTES", largest[path] - 1)
        refusal = refused(call)
        assert (refusal.code, refusal.reason, refusal.paths) == (
            "INVALID_ARGUMENT",
            "INVALID_FIELD",
            (path,),
        )
        assert f"{largest[path] - 1} bytes" in refusal.message


def test_the_longest_text_has_more_tokens_than_an_answer_holds(stub: Any) -> None:
    text = "x" * 2_097_152
    refusal = refused(
        lambda: stub.Tokenize(pb.TokenizeRequest(text=text, include_offsets=True), timeout=CALL_SECONDS)
    )
    assert (refusal.reason, refusal.paths) == ("INVALID_FIELD", ("text",))
