"""What a stream is made of: order, offsets, formats, ends. A real service, a scripted worker."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from kvatlas.models.text_vocabulary import toy_vocabulary
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc
from service.request import AbortReason
from service.testing import Refusal, RunningService, running_service
from service.testing_worker import WorkerScript
from service.text.backend import toy_backend
from service.text.tokenizer import Tokenizer

CALL_SECONDS = 120.0  # ends a call that hangs


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("stream"), script=WorkerScript(step_ms=0)) as service:
        yield service


@pytest.fixture(scope="module")
def stub(running: RunningService) -> Iterator[Any]:
    with grpc.insecure_channel(running.address) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def stream(stub: Any, spec: pb.GenerationSpec, **options: Any) -> list[pb.StreamGenerateResponse]:
    request = pb.StreamGenerateRequest(spec=spec, stream=pb.StreamOptions(**options))
    return list(stub.StreamGenerate(request, timeout=CALL_SECONDS))


def kinds(messages: list[pb.StreamGenerateResponse]) -> list[str]:
    return [str(message.WhichOneof("event")) for message in messages]


def deltas(messages: list[pb.StreamGenerateResponse], index: int = 0) -> list[pb.TokenDelta]:
    found = (message.delta for message in messages if message.WhichOneof("event") == "delta")
    return [delta for delta in found if delta.index == index]


def text_of(messages: list[pb.StreamGenerateResponse], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas(messages, index))


def finish_of(messages: list[pb.StreamGenerateResponse], index: int = 0) -> pb.ChoiceFinished:
    found = [m.choice_finished for m in messages if m.WhichOneof("event") == "choice_finished"]
    (finish,) = [finish for finish in found if finish.index == index]
    return finish


def spec_of(text: str, max_tokens: int | None = 16, **more: Any) -> pb.GenerationSpec:
    stop = more.pop("stop", pb.StopCriteria())
    if max_tokens is not None:
        stop.max_tokens = max_tokens
    return pb.GenerationSpec(text=text, stop=stop, **more)


def test_a_stream_is_started_then_deltas_then_an_end_per_choice_then_the_summary(stub: Any) -> None:
    messages = stream(stub, spec_of("abcdefgh", 12, sampling=pb.SamplingParams(n=3)))
    order = kinds(messages)
    assert order[0] == "started"
    assert order[-1] == "summary"
    assert order.count("choice_finished") == 3
    assert set(order) == {"started", "delta", "choice_finished", "summary"}
    for index in range(3):
        mine = [
            kind
            for kind, message in zip(order, messages, strict=True)
            if kind in ("delta", "choice_finished") and getattr(message, kind).index == index
        ]
        assert mine[-1] == "choice_finished"
        assert mine.count("choice_finished") == 1


def test_offsets_add_up_to_the_completion_tokens_of_each_choice(stub: Any) -> None:
    messages = stream(stub, spec_of("abcdefgh", 40, sampling=pb.SamplingParams(n=4)))
    for index in range(4):
        parts = deltas(messages, index)
        counts = [delta.token_count for delta in parts]
        assert [delta.token_offset for delta in parts] == [0, *itertools.accumulate(counts)][:-1]
        assert finish_of(messages, index).completion_tokens == sum(counts) == 40
    assert messages[-1].summary.usage.completion_tokens == 160


@pytest.mark.parametrize("stops", [[], ["c"], ["fg", "bcd"], ["zzz"]])
def test_the_joined_stream_is_the_text_of_the_unary_call(stub: Any, stops: list[str]) -> None:
    """M-33: incomplete characters and possible stop strings are held back, and nothing is lost."""
    spec = spec_of("ab😀cdéfg ", 33, stop=pb.StopCriteria(stop_strings=stops))
    spec.sampling.n = 2
    spec.sampling.seed = 7
    whole = stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
    messages = stream(stub, spec)
    for index in range(2):
        assert text_of(messages, index) == whole.choices[index].text
        finish = finish_of(messages, index)
        assert finish.finish_reason == whole.choices[index].finish_reason
        assert finish.stop_string == whole.choices[index].stop_string
    assert messages[-1].summary.usage.completion_tokens == whole.usage.completion_tokens


def test_the_prefix_counts_add_up_and_the_start_says_what_the_usage_says(stub: Any) -> None:
    messages = stream(stub, spec_of("x" * 100, 3))
    prefix = messages[0].started.prefix
    assert prefix == messages[-1].summary.usage.prefix
    assert messages[0].started.prompt_tokens == messages[-1].summary.usage.prompt_tokens == 100
    parts = (prefix.hit_tokens, prefix.miss_cold_tokens, prefix.miss_evicted_tokens, prefix.unaligned_tokens)
    assert sum(parts) == 100
    assert prefix.hit_tokens % 16 == 0
    assert prefix.hit_tokens > 0


def test_initial_metadata_has_the_request_id_and_comes_with_admission(
    stub: Any, running: RunningService
) -> None:
    spec = spec_of("hi", 1, request_id="my-id.1:2", labels={"fake.wait_ms": "300"})
    call = stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=CALL_SECONDS)
    first = next(call)
    assert dict(call.initial_metadata())["x-request-id"] == "my-id.1:2"
    assert first.started.request_id == "my-id.1:2"
    assert first.started.queue_time.ToMilliseconds() >= 290
    call.cancel()


def test_a_request_without_an_id_gets_a_uuid_of_version_7(stub: Any) -> None:
    ids = [stream(stub, spec_of("a", 1))[0].started.request_id for _ in range(3)]
    assert all(
        re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", i) for i in ids
    )
    assert len(set(ids)) == 3
    assert [i[:13] for i in ids] == sorted(i[:13] for i in ids)


def test_queue_updates_come_first_and_only_when_asked_for(stub: Any, running: RunningService) -> None:
    quiet = stream(stub, spec_of("a", 1, labels={"fake.wait_ms": "1200"}))
    assert "queued" not in kinds(quiet)
    labels = {"fake.wait_ms": "600000", "fake.queue_position": "3", "fake.estimated_wait_ms": "600000"}
    request = pb.StreamGenerateRequest(
        spec=spec_of("a", 1, labels=labels), stream=pb.StreamOptions(queue_updates=True)
    )
    call = stub.StreamGenerate(request, timeout=CALL_SECONDS)
    updates = [next(call).queued, next(call).queued]
    running.worker.let_go()
    last = kinds(list(call))
    assert last[last.index("started") :] == ["started", "delta", "choice_finished", "summary"]
    assert set(last[: last.index("started")]) <= {"queued"}
    assert updates[0].position <= 3
    waits = [update.estimated_wait.ToMilliseconds() for update in updates]
    assert waits[0] - waits[1] >= 950, "one a second at most"
    assert waits[1] > 0


def test_token_ids_come_without_text_and_both_come_together(stub: Any) -> None:
    spec = spec_of("abcd", 6, output=pb.OutputOptions(format=pb.OUTPUT_FORMAT_TOKEN_IDS))
    ids = stream(stub, spec)
    assert text_of(ids) == ""
    assert [i for delta in deltas(ids) for i in delta.token_ids] == list(b"abcdab")
    spec.output.format = pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
    both = stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
    assert both.choices[0].text == "abcdab"
    assert list(both.choices[0].token_ids) == list(b"abcdab")


def test_log_probabilities_come_with_the_bytes_of_their_tokens(stub: Any) -> None:
    spec = spec_of("ab", 5, output=pb.OutputOptions(logprobs=2))
    messages = stream(stub, spec)
    scores = [score for delta in deltas(messages) for score in delta.logprobs]
    assert [score.token_id for score in scores] == list(b"ababa")
    assert [score.token_bytes for score in scores] == [b"a", b"b", b"a", b"b", b"a"]
    assert scores[0].logprob == pytest.approx(-0.97)
    assert [(other.token_id, other.token_bytes) for other in scores[0].alternatives] == [
        (98, b"b"),
        (99, b"c"),
    ]
    for delta in deltas(messages):
        assert len(delta.logprobs) == delta.token_count
    whole = stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
    assert list(whole.choices[0].logprobs) == scores


def test_scores_of_dropped_tokens_are_dropped_with_them(stub: Any) -> None:
    spec = spec_of("abcd", 30, output=pb.OutputOptions(logprobs=0), stop=pb.StopCriteria(stop_strings=["c"]))
    choice = stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS).choices[0]
    assert [score.token_id for score in choice.logprobs] == list(b"abc")


def test_prompt_log_probabilities_leave_the_prefix_unset(stub: Any, running: RunningService) -> None:
    spec = spec_of("abc", 2, output=pb.OutputOptions(prompt_logprobs=1))
    messages = stream(stub, spec)
    scores = messages[-1].summary.prompt_logprobs
    assert [score.token_id for score in scores] == list(b"abc")
    assert not scores[0].HasField("logprob")
    assert scores[1].logprob == pytest.approx(-0.98)
    assert [other.token_id for other in scores[2].alternatives] == [100]
    assert not messages[0].started.HasField("prefix")
    assert not messages[-1].summary.usage.HasField("prefix")
    assert list(stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS).prompt_logprobs) == list(
        scores
    )


def test_a_stop_string_ends_its_sample_drops_what_follows_and_stops_the_worker(
    stub: Any, running: RunningService
) -> None:
    running.worker.aborts.clear()
    spec = spec_of("abcdefgh", 4000, stop=pb.StopCriteria(stop_strings=["ef"]))
    messages = stream(stub, spec)
    assert text_of(messages) == "abcd"
    finish = finish_of(messages)
    assert (finish.finish_reason, finish.stop_string) == (pb.FINISH_REASON_STOP_STRING, "ef")
    assert finish.completion_tokens == 6  # the tokens of the match count, later ones do not
    assert [reason for _, reason in running.worker.aborts] == [AbortReason.STOP_STRING]
    assert messages[-1].summary.usage.kv.page_seconds == 1.5  # the bill came with the end on the worker


def test_a_stop_string_can_be_kept_in_the_output(stub: Any) -> None:
    stop = pb.StopCriteria(stop_strings=["ef"], include_stop_in_output=True)
    assert text_of(stream(stub, spec_of("abcdefgh", 100, stop=stop))) == "abcdef"


def test_a_stop_string_counts_only_after_min_tokens(stub: Any) -> None:
    stop = pb.StopCriteria(stop_strings=["c"], min_tokens=5)
    messages = stream(stub, spec_of("abcd", 100, stop=stop))
    assert text_of(messages) == "abcdab"
    assert finish_of(messages).completion_tokens == 7


def test_stop_strings_work_without_text_in_the_output(stub: Any) -> None:
    spec = spec_of("abcd", 100, stop=pb.StopCriteria(stop_strings=["cd"]))
    spec.output.format = pb.OUTPUT_FORMAT_TOKEN_IDS
    choice = stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS).choices[0]
    assert list(choice.token_ids) == list(b"abcd")
    assert (choice.text, choice.stop_string) == ("", "cd")


@pytest.mark.parametrize(("ending", "reason"), [("<|end|>", "EOS"), ("X", "STOP_TOKEN")])
def test_the_text_of_the_token_that_ends_a_sample_is_not_shown(stub: Any, ending: str, reason: str) -> None:
    stop = pb.StopCriteria(stop_token_ids=[ord("X")])
    choice = stub.Generate(
        pb.GenerateRequest(spec=spec_of(f"ab{ending}", 50, stop=stop)), timeout=20
    ).choices[0]
    assert choice.text == "ab"
    assert choice.finish_reason == pb.FinishReason.Value(f"FINISH_REASON_{reason}")
    assert choice.stop_token_id == (ord("X") if reason == "STOP_TOKEN" else 0)


def test_ignore_eos_goes_on_past_the_end_token(stub: Any) -> None:
    stop = pb.StopCriteria(ignore_eos=True)
    spec = spec_of("ab<|end|>", 7, stop=stop)
    choice = stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS).choices[0]
    assert (choice.text, choice.finish_reason) == ("ababa", pb.FINISH_REASON_MAX_TOKENS)


def test_special_tokens_are_shown_when_asked_for(stub: Any) -> None:
    stop = pb.StopCriteria(ignore_eos=True)
    spec = spec_of("ab<|end|>", 4, stop=stop, output=pb.OutputOptions(skip_special_tokens=False))
    assert stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS).choices[0].text == "ab<|end|>a"


def test_an_answer_that_ends_inside_a_character_ends_with_a_replacement(stub: Any) -> None:
    """B072: the same in the stream and in the unary call."""
    for length, text in ((1, "\ufffd"), (2, "\ufffd"), (3, "\ufffd"), (4, "😀"), (5, "😀\ufffd")):
        spec = spec_of("😀", length)
        assert text_of(stream(stub, spec)) == text
        assert stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS).choices[0].text == text


def test_held_text_is_sent_when_no_stop_string_comes(stub: Any) -> None:
    """B067: the last characters are not lost."""
    messages = stream(stub, spec_of("ab", 5, stop=pb.StopCriteria(stop_strings=["abac"])))
    assert text_of(messages) == "ababa"


def test_max_tokens_unset_is_what_the_context_has_left(stub: Any, running: RunningService) -> None:
    spec = spec_of("ab", None, stop=pb.StopCriteria(stop_strings=["abab"]))
    stream(stub, spec)
    assert running.worker.adds[-1].params.max_tokens == 4096 - 2


def test_max_tokens_unset_never_asks_for_more_pages_than_there_are(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Whole prompt pages are shared by the samples, the rest is each one's own."""
    script = WorkerScript(num_pages=10, page_size=16, max_context=4096)
    with (
        running_service(tmp_path_factory.mktemp("small"), script=script) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for n in (1, 2, 4):
            spec = spec_of("x" * 40, None, stop=pb.StopCriteria(stop_strings=["xx"]))
            spec.sampling.n = n
            stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
            max_tokens = running.worker.adds[-1].params.max_tokens
            private_pages = -(-(40 + max_tokens) // 16) - 40 // 16
            assert 40 // 16 + n * private_pages <= 10
            assert max_tokens >= 1


def held_stream(stub: Any, hold_at: int, max_tokens: int, **options: Any) -> Any:
    """A stream whose worker stands still after so many tokens."""
    spec = spec_of("abcdefghijklmnop", max_tokens, labels={"fake.hold_at": str(hold_at)})
    request = pb.StreamGenerateRequest(spec=spec, stream=pb.StreamOptions(**options))
    call = stub.StreamGenerate(request, timeout=CALL_SECONDS)
    assert next(call).WhichOneof("event") == "started"
    return call


def test_min_tokens_per_message_joins_tokens_but_never_holds_the_first_or_the_end(
    stub: Any, running: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "service.handlers.validate.MAX_HOLD_SECONDS", 60.0
    )  # a busy machine stands still for one
    call = held_stream(stub, 1, 22, min_tokens_per_message=8, max_hold={"seconds": 60})
    assert next(call).delta.token_count == 1, "the first is not held"
    running.worker.let_go()
    counts = [delta.token_count for delta in deltas(list(call))]
    assert all(count >= 8 for count in counts[:-1])
    assert sum(counts) == 21


def test_max_hold_ends_the_wait_for_more_tokens(stub: Any, running: RunningService) -> None:
    call = held_stream(stub, 3, 8, min_tokens_per_message=64, max_hold={"nanos": 20_000_000})
    counts = [next(call).delta.token_count]
    while sum(counts) < 3:  # though the 64 are never reached
        counts.append(next(call).delta.token_count)
    running.worker.let_go()
    assert sum(counts) + sum(delta.token_count for delta in deltas(list(call))) == 8


def test_the_seed_is_drawn_and_told(stub: Any) -> None:
    seeds = [stream(stub, spec_of("a", 1))[0].started.seed for _ in range(2)]
    assert seeds[0] != seeds[1]
    assert stream(stub, spec_of("a", 1, sampling=pb.SamplingParams(seed=0)))[0].started.seed == 0


def test_the_bill_and_the_times_are_in_the_summary(stub: Any) -> None:
    summary = stream(stub, spec_of("ab", 6, labels={"fake.step_ms": "40", "fake.wait_ms": "20"}))[-1].summary
    assert (summary.usage.kv.page_seconds, summary.usage.kv.peak_pages, summary.usage.resumes) == (1.5, 2, 0)
    timing = summary.timing
    assert timing.receive_time.seconds > 1_700_000_000
    assert timing.queue_time.ToMicroseconds() >= 15_000
    assert timing.decode_time.ToMicroseconds() >= 80_000  # five steps of 40 ms, and some patience
    parts = timing.queue_time.ToMicroseconds() + timing.prefill_time.ToMicroseconds()
    assert parts == pytest.approx(timing.time_to_first_token.ToMicroseconds(), abs=5)


def test_values_reach_the_worker_as_they_were_given(stub: Any, running: RunningService) -> None:
    spec = pb.GenerationSpec(
        token_ids=pb.TokenSequence(ids=[1, 2, 3]),
        sampling=pb.SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            repetition_penalty=1.5,
            frequency_penalty=-1,
            presence_penalty=2,
            seed=1 << 63,
            logit_bias={5: -100, 6: 2.5},
        ),
        stop=pb.StopCriteria(max_tokens=2, min_tokens=1, stop_token_ids=[9], ignore_eos=True),
        scheduling=pb.SchedulingOptions(priority=-7, queue_timeout={"seconds": 3}),
        cache=pb.CacheOptions(read=False, write=False, salt="pepper"),
        labels={"team": "a"},
    )
    spec.stop.max_duration.FromMilliseconds(1500)
    stub.Generate(pb.GenerateRequest(spec=spec), timeout=1000)
    add = running.worker.adds[-1]
    assert memoryview(add.prompt_token_ids).cast("I").tolist() == [1, 2, 3]
    params = add.params
    given = (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty)
    assert given == (0.5, 0.25, 7, 0.125, 1.5)
    assert (params.frequency_penalty, params.presence_penalty, params.seed) == (-1, 2, 1 << 63)
    bias = zip(
        memoryview(params.logit_bias_token_ids).cast("I"),
        memoryview(params.logit_bias_values).cast("f"),
        strict=True,
    )
    assert sorted(bias) == [(5, -100), (6, 2.5)]
    assert (params.max_tokens, params.min_tokens, params.stop_at_eos) == (2, 1, False)
    assert memoryview(params.stop_token_ids).cast("I").tolist() == [9]
    assert (params.max_duration_ms, params.HasField("logprobs")) == (1500, False)
    assert (add.priority, add.cache_read, add.cache_write) == (-7, False, False)
    assert add.cache_salt == b"\0pepper"
    assert dict(add.labels) == {"team": "a"}
    assert 0 < add.queue_timeout_ms <= 3000
    assert 900_000 < add.timeout_ms <= 1_010_000  # gRPC rounds a deadline up, by a hundredth at most
    assert add.receive_time.seconds > 1_700_000_000


def test_a_chat_is_rendered_by_the_models_template(stub: Any, running: RunningService) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hello")])
    stub.Generate(
        pb.GenerateRequest(spec=pb.GenerationSpec(chat=chat, stop={"max_tokens": 1})), timeout=CALL_SECONDS
    )
    rendered = stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=CALL_SECONDS)
    assert "hello" in rendered.rendered_text
    prompt = memoryview(running.worker.adds[-1].prompt_token_ids).cast("I").tolist()
    assert prompt == list(rendered.token_ids)


def test_tokenize_gives_ids_offsets_pages_and_detokenize_turns_them_back(stub: Any) -> None:
    text = "é😀 " + "word " * 400
    response = stub.Tokenize(pb.TokenizeRequest(text=text, include_offsets=True), timeout=CALL_SECONDS)
    assert (
        response.token_count == len(response.token_ids) == len(response.start_offsets) == len(text.encode())
    )
    assert response.page_count == -(-response.token_count // 16)
    assert response.rendered_text == text
    back = stub.Detokenize(pb.DetokenizeRequest(token_ids=response.token_ids), timeout=CALL_SECONDS)
    assert back.text == text
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=[0xF0, 257]), timeout=CALL_SECONDS).text == "\ufffd"
    shown = stub.Detokenize(
        pb.DetokenizeRequest(token_ids=[257], skip_special_tokens=False), timeout=CALL_SECONDS
    )
    assert shown.text == "<|end|>"


def test_cancel_generation_ends_the_other_call_normally_with_its_bill(
    stub: Any, running: RunningService
) -> None:
    running.worker.aborts.clear()
    spec = spec_of("abcdef", 4000, request_id="victim", labels={"fake.step_ms": "30"})
    call = stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=CALL_SECONDS)
    messages = [next(call), next(call)]
    request = pb.CancelGenerationRequest(request_ids=["victim", "nobody", "victim"])
    answer = stub.CancelGeneration(request, timeout=CALL_SECONDS)
    assert (list(answer.cancelled_ids), list(answer.unknown_ids)) == (["victim"], ["nobody"])
    messages += list(call)
    assert finish_of(messages).finish_reason == pb.FINISH_REASON_CANCELLED
    assert kinds(messages)[-1] == "summary"
    assert messages[-1].summary.usage.kv.page_seconds == 1.5
    assert [reason for _, reason in running.worker.aborts] == [AbortReason.CANCELLED]
    assert list(stub.CancelGeneration(request, timeout=CALL_SECONDS).unknown_ids) == ["victim", "nobody"]


def test_cancel_generation_reaches_a_request_in_the_queue(stub: Any, running: RunningService) -> None:
    spec = spec_of("abcdef", 4000, request_id="waiting", labels={"fake.wait_ms": "600000"})
    pending = stub.Generate.future(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
    request = pb.CancelGenerationRequest(request_ids=["waiting"])
    while not stub.CancelGeneration(request, timeout=CALL_SECONDS).cancelled_ids:
        assert not pending.done()
    response = pending.result()
    assert response.choices[0].finish_reason == pb.FINISH_REASON_CANCELLED
    assert response.usage.completion_tokens == 0
    assert response.usage.prompt_tokens == 6


def test_a_cancelled_sample_shows_the_text_that_was_held(stub: Any) -> None:
    """B067 for the end by cancel."""
    stop = pb.StopCriteria(stop_strings=["abcdefgh" * 3])
    spec = spec_of("abcdefgh", 2000, request_id="held", stop=stop, labels={"fake.hold_at": "10"})
    call = stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=CALL_SECONDS)
    messages = [next(call)]
    while sum(message.delta.token_count for message in messages) < 10:
        messages.append(next(call))
    assert text_of(messages) == ""
    stub.CancelGeneration(pb.CancelGenerationRequest(request_ids=["held"]), timeout=CALL_SECONDS)
    messages += list(call)
    text = text_of(messages)
    assert (text, finish_of(messages).completion_tokens) == ("abcdefghab", 10)


def test_a_failed_sample_fails_the_call_and_stops_its_siblings(stub: Any, running: RunningService) -> None:
    running.worker.aborts.clear()
    labels = {"fake.step_ms": "2", "fake.fail_at": "5"}
    spec = spec_of("abcdef", 1000, sampling=pb.SamplingParams(n=3), labels=labels)
    with pytest.raises(grpc.RpcError) as raised:
        stream(stub, spec)
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.message, refusal.reason) == ("INTERNAL", "internal error", "INTERNAL")
    assert refusal.metadata["request_id"]


def test_every_request_leaves_the_service_idle(running: RunningService, wait_until: Any) -> None:
    wait_until(lambda: running.is_idle, "idle service and worker")


def test_an_answer_keeps_its_first_space_where_it_goes_on_with_a_text(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """B073: a vocabulary that puts a space before the first word; the worker says the prompt again."""
    template = "{{ messages[0]['content'] }}"
    vocabulary = replace(toy_vocabulary(512), strips_first_space=True, chat_template=template)
    tokenizer = Tokenizer(toy_backend(vocabulary), vocabulary)
    folder, script = tmp_path_factory.mktemp("spaces"), WorkerScript(step_ms=0)
    said = [pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=" ab")]
    stop = pb.StopCriteria(max_tokens=6)
    with (
        running_service(folder, script=script, tokenizer=tokenizer) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        assert text_of(stream(stub, pb.GenerationSpec(text=" ab", stop=stop))) == " ab ab"
        ids = pb.TokenSequence(ids=list(b" ab"))
        assert text_of(stream(stub, pb.GenerationSpec(token_ids=ids, stop=stop))) == " ab ab"
        chat = pb.ChatPrompt(messages=said, continue_final_message=True)
        assert text_of(stream(stub, pb.GenerationSpec(chat=chat, stop=stop))) == " ab ab"
        chat = pb.ChatPrompt(messages=said)
        assert text_of(stream(stub, pb.GenerationSpec(chat=chat, stop=stop))) == "ab ab"
