"""Calls of GenerationService from their opening to what they leave, before a worker that a test plays."""

import asyncio
from array import array
from typing import Any, cast

import pytest
from google.protobuf.duration_pb2 import Duration

from kvatlas.v1 import generation_pb2 as pb
from service import errors
from service.handlers import account, generation, sizes, validate
from service.request import AbortReason, AddStatus, FinishCode, Scores
from service.testing_cache import refused, until
from service.text.tokenizer import Tokenizer
from tests.generation_bench import Context, Desk, turns

LONG = "a" * 50_000  # made to ids beside the loop


def test_a_stream_tells_its_messages_in_order_and_gives_everything_back() -> None:
    async def work() -> None:
        desk, context = Desk(), Context()
        task = desk.stream(context)
        await turns()
        desk.link.answer(AddStatus.ACCEPTED)
        await turns()
        assert not context.written, "it did not ask for its place in the queue"
        first = desk.link.sent[-1].sequence_id
        desk.link.step(starts=[first])
        await turns()
        assert (context.written[0].started.model, context.written[0].started.worker_id) == ("m", "w")
        desk.link.step((first, 65))
        await turns()
        desk.link.step((first, 66), ends=[(first, FinishCode.MAX_TOKENS)])
        await asyncio.wait_for(task, 60)
        assert context.events() == ["started", "delta", "delta", "choice_finished", "summary"]
        assert context.heads == [{"x-request-id": "r"}]
        assert context.written[-1].summary.usage.completion_tokens == 2
        (ending,) = desk.traces.ended
        assert (ending.name, ending.attributes["kvatlas.outcome"]) == ("text_completion m", "completed")
        assert (desk.ended(), desk.is_idle) == ({"completed": 1}, True)

    asyncio.run(work())


def test_what_a_client_has_already_is_not_counted_again() -> None:
    async def work() -> None:
        desk, context = Desk(), Context()
        task = desk.stream(context, max_tokens=9, resume_after=pb.TokenSequence(ids=[65, 66]))
        await turns()
        assert list(desk.link.sent[0].resume_ids) == [65, 66]
        first = desk.admit()
        desk.link.step((first, 67), ends=[(first, FinishCode.EOS)])
        await asyncio.wait_for(task, 60)
        value = desk.metrics.registry.get_sample_value
        assert value("kvatlas_request_generated_tokens_sum") == 1
        assert context.written[1].delta.token_offset == 2

    asyncio.run(work())


def test_who_does_not_read_the_end_of_a_call_that_no_worker_had_loses_it_too() -> None:
    """All had ended before anybody listened: it kept its place for ever."""

    async def work() -> None:
        desk, context = Desk(slow_reader_seconds=0.0), Context(gate=asyncio.Event())
        async with desk.held_prompts():
            task = desk.stream(context, text=LONG)
            await turns()
            (live,) = desk.live.everything()
            live.cancel()
        failure = await refused(asyncio.wait_for(task, 60))
        assert failure.reason == "SLOW_READER"
        assert desk.is_idle

    asyncio.run(work())


def test_who_does_not_read_the_end_loses_it_and_what_it_has_not_got_is_said() -> None:
    async def work() -> None:
        desk, context = Desk(slow_reader_seconds=0.0), Context()
        task = desk.stream(context)
        await turns()
        first = desk.admit()
        desk.link.step((first, 65))
        await turns()
        context.gate = asyncio.Event()
        desk.link.step((first, 65), ends=[(first, FinishCode.EOS)])
        failure = await refused(asyncio.wait_for(task, 60))
        assert (failure.reason, failure.metadata["tokens_sent"]) == ("SLOW_READER", "2")
        assert desk.metrics.registry.get_sample_value("kvatlas_stream_slow_readers_total") == 1
        assert (desk.ended(), desk.is_idle) == ({"failed": 1}, True)

    asyncio.run(work())


@pytest.mark.parametrize("kind", ["duplicate", "quota", "full", "long", "empty"])
def test_what_is_refused_on_its_way_in_leaves_what_was_there_as_it_was(kind: str) -> None:
    async def work() -> None:
        desk, context = Desk(max_calls=1 if kind == "full" else 4), Context()
        if kind == "quota":
            desk.quota.limit(1, 0)
        first = desk.stream(context)
        await turns()
        fields: dict[str, Any] = {"request_id": "r" if kind == "duplicate" else "other"}
        fields |= {"long": {"text": "a" * 100_001}, "empty": {"text": ""}}.get(kind, {})
        failure = await refused(asyncio.wait_for(desk.stream(Context(), **fields), 60))
        reasons = {"duplicate": "DUPLICATE_REQUEST_ID", "quota": "QUOTA_EXCEEDED", "full": "QUEUE_FULL"}
        reasons |= {"long": "PROMPT_TOO_LONG", "empty": "INVALID_FIELD"}
        assert (failure.reason, desk.ended()) == (reasons[kind], {"rejected": 1})
        assert (desk.admission.active, desk.quota.active, desk.quota.queued, len(desk.live)) == (1, 1, 1, 1)
        desk.end(desk.admit(), code=FinishCode.EOS)
        await asyncio.wait_for(first, 60)
        assert (desk.ended(), desk.is_idle) == ({"rejected": 1, "completed": 1}, True)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("end", "outcome", "reason", "is_admitted"),
    [
        ("client", "cancelled", AbortReason.CLIENT, False),
        ("client", "cancelled", AbortReason.CLIENT, True),
        ("deadline", "deadline", AbortReason.DEADLINE, False),
        ("deadline", "deadline", AbortReason.DEADLINE, True),
        ("drain", "rejected", AbortReason.OPERATOR, False),
        ("drain", "failed", AbortReason.OPERATOR, True),
        ("write", "failed", AbortReason.SERVICE_ERROR, True),
    ],
)
def test_a_call_that_ends_early_is_taken_from_its_worker_for_that_reason(
    end: str, outcome: str, reason: AbortReason, is_admitted: bool
) -> None:
    async def work() -> None:
        desk, context = Desk(), Context()
        task = desk.stream(context)
        await turns()
        first = desk.link.sent[-1].sequence_id
        if is_admitted:
            desk.admit()
            await turns()
            assert (desk.quota.active, desk.quota.queued) == (1, 0), "it waits no longer"
        if end == "drain":
            (live,) = desk.live.everything()
            live.fail(errors.draining(0), AbortReason.OPERATOR)
            assert (await refused(asyncio.wait_for(task, 60))).reason == "DRAINING"
        elif end == "write":
            context.fails = True
            desk.link.step((first, 65))
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(task, 60)
        else:
            desk.call.deadline = 0.0 if end == "deadline" else None
            task.cancel()
            await asyncio.wait([task], timeout=60)
            assert task.cancelled()
        assert desk.link.aborted == [([first], reason)]
        assert (desk.ended(), desk.is_idle) == ({outcome: 1}, True)

    asyncio.run(work())


@pytest.mark.parametrize("end", ["cancel", "client", "drain", "grace", "deadline"])
def test_a_call_that_ends_while_its_prompt_is_made_to_ids_reaches_no_worker(end: str) -> None:
    async def work() -> None:
        desk, context = Desk(), Context()
        async with desk.held_prompts():
            task = desk.stream(context, text=LONG)
            await turns()
            (live,) = desk.live.everything()
            if end == "cancel":
                live.cancel()
            if end in ("drain", "grace"):
                live.fail(errors.draining(0), AbortReason.OPERATOR)
            if end == "deadline":
                desk.call.deadline = 0.0
            if end in ("client", "grace", "deadline"):
                task.cancel()
                await asyncio.wait([task], timeout=60)
        if end in ("drain", "grace"):
            assert (await refused(asyncio.wait_for(task, 60))).reason == "DRAINING"
        else:
            await asyncio.wait([task], timeout=60)
            assert task.cancelled() == (end != "cancel")
        if end == "cancel":
            assert context.written[1].choice_finished.finish_reason == pb.FINISH_REASON_CANCELLED
        outcome = {"drain": "rejected", "grace": "rejected", "deadline": "deadline"}.get(end, "cancelled")
        assert (desk.ended(), desk.link.sent, desk.is_idle) == ({outcome: 1}, [], True)

    asyncio.run(work())


@pytest.mark.parametrize("is_whole", [False, True])
def test_what_a_worker_ends_by_itself_is_a_bug(is_whole: bool) -> None:
    async def work() -> None:
        desk = Desk()
        task: asyncio.Task[Any] = desk.whole(Context()) if is_whole else desk.stream(Context())
        await turns()
        desk.end(desk.admit(), code=FinishCode.ABORTED)
        assert (await refused(asyncio.wait_for(task, 60))).reason == "INTERNAL"
        assert (desk.ended(), desk.is_idle) == ({"failed": 1}, True)

    asyncio.run(work())


@pytest.mark.parametrize(("pause", "updates"), [(3600.0, 1), (0.0, 3)])
def test_a_place_in_the_queue_is_told_once_in_a_while(
    pause: float, updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "QUEUE_UPDATE_SECONDS", pause)

    async def work() -> None:
        desk, context = Desk(), Context()
        task = desk.stream(context, stream=pb.StreamOptions(queue_updates=True))
        await turns()
        assert not context.written, "its worker has not said where it stands"
        desk.link.answer(AddStatus.ACCEPTED)
        (live,) = desk.live.everything()
        assert live.run is not None
        if pause:
            for _ in range(5):
                live.run.inbox.wake()
                await turns()
        else:  # nothing happens
            await until(lambda: len(context.written) >= updates)
            assert context.heads == [{"x-request-id": "r"}]
        assert set(context.events()) == {"queued"}
        assert len(context.written) >= updates
        first = desk.link.sent[-1].sequence_id
        desk.link.step(starts=[first], ends=[(first, FinishCode.EOS)])
        await asyncio.wait_for(task, 60)
        if pause:
            assert context.events() == ["queued", "started", "choice_finished", "summary"]
        assert context.heads == [{"x-request-id": "r"}]

    asyncio.run(work())


def test_tokens_that_went_out_together_and_the_time_of_stalled_writes_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(account, "STALLED_WRITE_SECONDS", -1.0)

    async def work() -> None:
        desk, context = Desk(), Context()
        value = desk.metrics.registry.get_sample_value
        task = desk.stream(context, max_tokens=20)
        await turns()
        first = desk.admit()
        await turns()
        for count in (1, 3, 1):
            desk.link.step(*[(first, 65)] * count)
            await turns()
        assert value("kvatlas_stream_merges_total") == 2
        assert value("kvatlas_generated_tokens_total") == 5
        assert value("kvatlas_inter_token_latency_seconds_count") == 2
        stalled = value("kvatlas_stream_send_blocked_seconds_total") or 0.0
        context.gate = asyncio.Event()
        desk.link.step((first, 65))
        await turns()
        task.cancel()
        await asyncio.wait([task], timeout=60)
        assert (value("kvatlas_stream_send_blocked_seconds_total") or 0.0) > stalled > 0

    asyncio.run(work())


@pytest.mark.parametrize("is_whole", [False, True])
def test_log_probabilities_of_the_prompt_are_told_and_what_no_message_holds_is_refused(
    is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(limit: int) -> Any:
        desk, context = Desk(), Context()
        output = pb.OutputOptions(prompt_logprobs=0)
        begin = desk.whole if is_whole else desk.stream
        task: asyncio.Task[Any] = begin(context, output=output)
        await turns()
        (live,) = desk.live.everything()
        assert live.run is not None
        count = len(live.run.request.prompt_ids)
        scores = Scores(array("f", [-0.5] * count), array("I", [1] * count), bytearray(count))
        live.run.inbox.prompt_scored(scores)
        monkeypatch.setattr(sizes, "MAX_ANSWER_BYTES", limit)
        desk.end(desk.admit(), code=FinishCode.EOS)
        try:
            answer = await asyncio.wait_for(task, 60)
        finally:
            assert desk.is_idle
        told = answer if is_whole else context.written[-1].summary
        return [entry.logprob for entry in told.prompt_logprobs], count

    told, count = asyncio.run(work(100_000))
    assert (told, count > 0) == ([-0.5] * count, True)
    failure = asyncio.run(refused(work(10)))
    assert (failure.reason, "StreamGenerate" in failure.message) == ("INVALID_FIELD", is_whole)


def test_a_whole_answer_has_its_samples_in_order_and_counts_no_pauses() -> None:
    async def work() -> None:
        desk, context = Desk(), Context()
        output = pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS)
        task = desk.whole(context, sampling=pb.SamplingParams(n=2, temperature=1.0), output=output)
        await turns()
        first = desk.admit()
        for sample, token in ((1, 66), (0, 65), (1, 66)):
            desk.link.step((first + sample, token))
            await turns()
        desk.end(first + 1)
        await turns()
        assert not task.done()
        desk.end(first, code=FinishCode.EOS)
        answer = await asyncio.wait_for(task, 60)
        decode = Tokenizer.toy().decode
        assert [(each.index, list(each.token_ids), each.text) for each in answer.choices] == [
            (index, ids, decode(ids, skip_special_tokens=True)) for index, ids in enumerate(([65], [66, 66]))
        ]
        ends = [each.finish_reason for each in answer.choices]
        assert ends == [pb.FINISH_REASON_EOS, pb.FINISH_REASON_MAX_TOKENS]
        assert answer.usage.completion_tokens == 3
        assert (answer.model, answer.worker_id, context.heads) == ("m", "w", [{"x-request-id": "r"}])
        value = desk.metrics.registry.get_sample_value
        assert value("kvatlas_generated_tokens_total") == 3
        assert not value("kvatlas_inter_token_latency_seconds_count")

    asyncio.run(work())


def test_messages_of_at_least_so_many_tokens_are_no_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "MAX_HOLD_SECONDS", 600.0)

    async def work() -> None:
        desk, context = Desk(), Context()
        options = pb.StreamOptions(min_tokens_per_message=2, max_hold=Duration(seconds=600))
        task = desk.stream(context, max_tokens=20, stream=options)
        await turns()
        first = desk.admit()
        for count, messages in ((1, 2), (1, 2), (1, 3), (3, 4)):  # the first token is never held
            desk.link.step(*[(first, 65)] * count)
            await turns()
            assert len(context.written) == messages
        assert desk.metrics.registry.get_sample_value("kvatlas_stream_merges_total") == 1
        task.cancel()
        await asyncio.wait([task], timeout=60)

    asyncio.run(work())


def test_while_a_sample_runs_its_reader_has_all_the_time() -> None:
    async def work() -> None:
        desk, context = Desk(slow_reader_seconds=0.0), Context()
        task = desk.stream(context)
        await turns()
        first = desk.admit()
        gate = context.gate = asyncio.Event()
        desk.link.step((first, 65))
        await turns()
        assert not task.done()
        gate.set()
        await turns()
        assert context.events() == ["started", "delta"]
        task.cancel()
        await asyncio.wait([task], timeout=60)

    asyncio.run(work())


def test_many_log_probabilities_of_a_prompt_are_written_beside_the_loop() -> None:
    async def work() -> None:
        desk, context = Desk(), Context()
        task = desk.stream(context, text="a" * 200, output=pb.OutputOptions(prompt_logprobs=0))
        await turns()
        (live,) = desk.live.everything()
        assert live.run is not None
        count = len(live.run.request.prompt_ids)
        live.run.inbox.prompt_scored(
            Scores(array("f", [0.0] * count), array("I", [1] * count), bytearray(count))
        )
        async with desk.held_prompts():
            desk.end(desk.admit(), code=FinishCode.EOS)
            await turns()
            assert context.events() == ["started", "choice_finished"]
        await asyncio.wait_for(task, 60)
        assert len(context.written[-1].summary.prompt_logprobs) == count

    asyncio.run(work())


def test_a_whole_answer_has_what_was_asked_for_and_ends_as_soon_as_no_message_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        desk = Desk()
        score = Scores(array("f", [-0.5]), array("I", [1]), bytearray(1))
        formats = (pb.OUTPUT_FORMAT_TEXT, ("A", [])), (pb.OUTPUT_FORMAT_TOKEN_IDS, ("", [65])), (0, None)
        for format_, expected in formats:
            task = desk.whole(Context(), output=pb.OutputOptions(format=cast(Any, format_), logprobs=0))
            await turns()
            first = desk.admit()
            (live,) = desk.live.everything()
            assert live.run is not None
            if expected is None:
                monkeypatch.setattr(sizes, "MAX_ANSWER_BYTES", 5)
            live.run.choices[0].box.put_scored(65, score, 0, 0)
            await turns()
            if expected is not None:
                desk.end(first)
                (choice,) = (await asyncio.wait_for(task, 60)).choices
                assert [entry.logprob for entry in choice.logprobs] == [-0.5]
                assert (choice.text, list(choice.token_ids)) == expected
        assert (await refused(asyncio.wait_for(task, 60))).reason == "INVALID_FIELD"
        assert desk.link.aborted == [([first], AbortReason.SERVICE_ERROR)]

    asyncio.run(work())
