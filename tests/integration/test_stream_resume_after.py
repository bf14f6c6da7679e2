"""A client goes on with an answer whose service died: `resume_after` against the real worker's scheduler."""

import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvatlas.client.errors import KvatlasError, from_rpc_error
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc

MAX_TOKENS = 24
CALL_SECONDS = 120.0
EOS = 257  # of the toy vocabulary
STOP_AT_9 = pb.StopCriteria(max_tokens=MAX_TOKENS, stop_token_ids=[9])


@pytest.fixture
def stub(fake_server: Any) -> Iterator[Any]:
    with grpc.insecure_channel(fake_server.address) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]


def request_of(resume_after: "list[int] | tuple[int, ...]" = (), **spec: Any) -> pb.StreamGenerateRequest:
    given: dict[str, Any] = {
        "text": "a prompt that is the same each time",
        "sampling": pb.SamplingParams(temperature=0.9, seed=11, frequency_penalty=0.4),
        "stop": pb.StopCriteria(max_tokens=MAX_TOKENS),
        "output": pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS),
    }
    request = pb.StreamGenerateRequest(spec=pb.GenerationSpec(**(given | spec)))
    request.resume_after.ids.extend(resume_after)
    return request


class Answer:
    """All of one stream."""

    def __init__(self, stub: Any, request: pb.StreamGenerateRequest) -> None:
        messages = list(stub.StreamGenerate(request, timeout=CALL_SECONDS))
        deltas = [message.delta for message in messages if message.WhichOneof("event") == "delta"]
        self.first_offset = deltas[0].token_offset if deltas else None
        self.ids = [token_id for delta in deltas for token_id in delta.token_ids]
        self.pieces = [(len(delta.token_ids), delta.text) for delta in deltas]
        self.text = "".join(delta.text for delta in deltas)
        self.logprobs = [entry.logprob for delta in deltas for entry in delta.logprobs]
        self.end = next(
            message.choice_finished
            for message in messages
            if message.WhichOneof("event") == "choice_finished"
        )
        self.usage = messages[-1].summary.usage

    def text_after(self, count: int) -> str | None:
        """What had been shown when so many tokens were; None: not between two messages."""
        seen, shown = 0, ""
        for length, text in self.pieces:
            seen, shown = seen + length, shown + text
            if seen == count:
                return shown
        return None


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"sampling": pb.SamplingParams(temperature=0)},
        {"output": pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS, logprobs=1)},
        {"regex": "[a-f ]{12,20}"},
        {"stop": pb.StopCriteria(max_tokens=MAX_TOKENS, min_tokens=4, stop_strings=["e", "a"])},
    ],
    ids=["seeded", "greedy", "logprobs", "constraint", "stop strings"],
)
def test_wherever_it_is_cut_the_rest_is_the_rest_of_the_whole_answer(stub: Any, spec: dict[str, Any]) -> None:
    whole = Answer(stub, request_of(**spec))
    assert len(whole.ids) > 3
    for count in (1, len(whole.ids) // 2, len(whole.ids) - 1):
        rest = Answer(stub, request_of(whole.ids[:count], **spec))
        assert rest.first_offset == count
        assert whole.ids[:count] + rest.ids == whole.ids
        assert whole.text.endswith(rest.text)
        shown = whole.text_after(count)
        assert shown is None or shown + rest.text == whole.text
        assert rest.end == whole.end
        assert rest.usage.completion_tokens == whole.usage.completion_tokens
        assert rest.usage.prompt_tokens == whole.usage.prompt_tokens
        assert rest.logprobs == pytest.approx(whole.logprobs[len(whole.logprobs) - len(rest.logprobs) :])


def test_tokens_that_the_client_had_are_not_counted_as_generated_again(
    stub: Any, fake_server: Any, wait_until: Any
) -> None:
    def figures() -> tuple[float, float]:
        url = f"http://127.0.0.1:{fake_server.facts['metrics_port']}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            text = answer.read().decode()
        names = ("kvatlas_generated_tokens_total", "kvatlas_request_generated_tokens_sum")
        values = [re.search(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE) for name in names]
        return float(values[0][1]), float(values[1][1])  # type: ignore[index]

    whole = Answer(stub, request_of())
    before = figures()
    Answer(stub, request_of(whole.ids[:10]))
    own = len(whole.ids) - 10
    wait_until(lambda: figures() == (before[0] + own, before[1] + own), "both counters")


def refusal(stub: Any, request: pb.StreamGenerateRequest) -> KvatlasError:
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.StreamGenerate(request, timeout=CALL_SECONDS))
    return from_rpc_error(raised.value, "")


@pytest.mark.parametrize(
    ("resume_after", "spec", "field", "words"),
    [
        ([1, 2, 10**6], {}, "resume_after.ids", "1000000 is not below"),
        ([5] * MAX_TOKENS, {}, "resume_after", "24 tokens are not fewer than 24"),
        ([5], {"sampling": pb.SamplingParams(n=2)}, "resume_after", "of one sample, 2 are asked for"),
        ([5, EOS], {}, "resume_after", f"ends with token {EOS}, which ended the answer"),
        ([5, 9], {"stop": STOP_AT_9}, "resume_after", "ends with token 9, which ended the answer"),
    ],
)
def test_output_that_the_request_cannot_have_had_is_refused(
    stub: Any, resume_after: list[int], spec: dict[str, Any], field: str, words: str
) -> None:
    error = refusal(stub, request_of(resume_after, **spec))
    assert error.reason == "INVALID_FIELD"
    assert [violation.field for violation in error.violations] == [field]
    assert words in error.violations[0].description


def test_output_with_the_stop_string_in_it_is_refused(stub: Any) -> None:
    whole = Answer(stub, request_of())
    stop = pb.StopCriteria(max_tokens=MAX_TOKENS, stop_strings=[whole.text[2:4]])
    error = refusal(stub, request_of(whole.ids[:-1], stop=stop))
    assert (error.reason, error.violations[0].field) == ("INVALID_FIELD", "resume_after")


def test_output_that_breaks_the_constraint_ends_that_request_and_nothing_else(stub: Any) -> None:
    digits = Answer(stub, request_of(regex="[0-9]{8,12}"))
    error = refusal(stub, request_of(digits.ids[:5], regex="[a-f]{12,20}"))
    assert error.reason in ("CONSTRAINT_DEAD_END", "INVALID_FIELD"), error
    assert Answer(stub, request_of()).ids
