"""A stream survives its worker, or says clearly that it did not."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc, server_pb2, server_pb2_grpc
from service.testing import Refusal, RunningService, running_service
from service.testing_worker import WorkerScript


@pytest.fixture
def running(tmp_path: Any, wait_until: Any) -> Iterator[RunningService]:
    with running_service(tmp_path, script=WorkerScript(step_ms=0), resume_seconds=60.0) as service:
        yield service


@pytest.fixture
def impatient(tmp_path: Any) -> Iterator[RunningService]:
    """For workers that do not come back."""
    with running_service(tmp_path, script=WorkerScript(step_ms=0), resume_seconds=0.9) as service:
        yield service


@pytest.fixture
def stub(running: RunningService) -> Iterator[Any]:
    with stub_of(running) as stub:
        yield stub


CALL_SECONDS = 120.0  # ends a call that hangs
HELD = {"fake.hold_at": "12"}  # nothing ends before its worker is lost


@contextmanager
def stub_of(running: RunningService) -> Iterator[Any]:
    with grpc.insecure_channel(running.address) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def request_of(text: str, max_tokens: int = 60, **more: Any) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(
        spec=pb.GenerationSpec(text=text, stop=pb.StopCriteria(max_tokens=max_tokens), **more)
    )


def read(call: Any, tokens: int) -> list[pb.StreamGenerateResponse]:
    """Messages until so many tokens have come."""
    messages: list[pb.StreamGenerateResponse] = []
    while sum(message.delta.token_count for message in messages) < tokens:
        messages.append(next(call))
    return messages


def text_of(messages: list[pb.StreamGenerateResponse], index: int = 0) -> str:
    deltas = [message.delta for message in messages if message.WhichOneof("event") == "delta"]
    return "".join(delta.text for delta in deltas if delta.index == index)


def expected(text: str, count: int, index: int = 0) -> str:
    """What the scripted worker says: the prompt again and again, each sample a place further."""
    return (text * (count // len(text) + 2))[index : index + count]


def restart(running: RunningService) -> None:
    running.worker.stop()
    running.worker.start()


def test_a_stream_goes_on_after_its_worker_was_restarted(running: RunningService, stub: Any) -> None:
    call = stub.StreamGenerate(request_of("abcdefg", labels=HELD), timeout=CALL_SECONDS)
    messages = read(call, 12)
    restart(running)
    messages += list(call)
    assert text_of(messages) == expected("abcdefg", 60)
    offsets = [m.delta.token_offset for m in messages if m.WhichOneof("event") == "delta"]
    assert offsets == sorted(set(offsets))  # no token twice
    assert messages[-1].summary.usage.resumes == 1
    assert messages[-1].summary.usage.completion_tokens == 60
    resumed = running.worker.adds[-1]
    assert (resumed.attempt, resumed.sample_count) == (1, 1)
    assert len(resumed.resume_token_ids) // 4 == 12
    assert resumed.sequence_id != running.worker.adds[0].sequence_id
    assert running.value("kvatlas_resumes_total", reason="crash") == 1
    assert running.value("kvatlas_resume_gap_seconds_count") == 1
    computed = running.value("kvatlas_resume_prefix_tokens_total", result="computed")
    hit = running.value("kvatlas_resume_prefix_tokens_total", result="hit")
    assert hit + computed == 7 + len(resumed.resume_token_ids) // 4


def test_samples_are_resumed_one_by_one_and_only_those_that_had_not_ended(
    running: RunningService, stub: Any
) -> None:
    request = request_of("abcdefgh", 60, sampling=pb.SamplingParams(n=3), labels=HELD)
    # The first two samples begin with one of these; in the third one they come after the hold.
    request.spec.stop.stop_strings.extend(["abcdefgha", "bcdefghab"])
    call = stub.StreamGenerate(request, timeout=CALL_SECONDS)
    messages: list[Any] = []

    def ended() -> list[int]:
        ends = [m.choice_finished for m in messages if m.WhichOneof("event") == "choice_finished"]
        return sorted(end.index for end in ends)

    while ended() != [0, 1]:
        messages.append(next(call))
    restart(running)
    messages += list(call)
    assert ended() == [0, 1, 2]
    assert {add.first_choice_index for add in running.worker.adds if add.attempt} == {2}
    assert messages[-1].summary.usage.resumes == 1


def test_a_unary_call_goes_on_too(running: RunningService, stub: Any, wait_until: Any) -> None:
    request = pb.GenerateRequest(spec=request_of("abc", 80, labels=HELD).spec)
    pending = stub.Generate.future(request, timeout=CALL_SECONDS)
    wait_until(lambda: running.value("kvatlas_prompt_tokens_total") > 0, "the start")
    restart(running)
    response = pending.result()
    assert response.choices[0].text == expected("abc", 80)
    assert response.usage.resumes == 1


def test_a_request_in_the_queue_is_sent_again_without_a_trace(
    running: RunningService, stub: Any, wait_until: Any
) -> None:
    running.worker.script.wait_ms = 60_000
    call = stub.StreamGenerate(request_of("abc", 5, sampling=pb.SamplingParams(n=2)), timeout=CALL_SECONDS)
    wait_until(lambda: running.worker.live_sequences == 2, "the request in the queue")
    running.worker.script.wait_ms = 0
    restart(running)
    messages = list(call)
    assert messages[0].WhichOneof("event") == "started"
    assert text_of(messages) == "abcab"
    assert messages[-1].summary.usage.resumes == 0
    assert running.worker.adds[-1].sample_count == 2  # all together again
    assert running.value("kvatlas_resumes_total", reason="crash") == 0


def test_nobody_takes_over_before_the_start(impatient: RunningService, wait_until: Any) -> None:
    running = impatient
    running.worker.script.wait_ms = 60_000
    with stub_of(running) as stub:
        call = stub.StreamGenerate(request_of("abc"), timeout=CALL_SECONDS)
        wait_until(lambda: running.worker.live_sequences, "the request in the queue")
        running.worker.stop()
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.reason) == ("UNAVAILABLE", "WORKER_LOST")
    assert refusal.metadata["worker_id"] == "worker-0"
    assert refusal.metadata["tokens_sent"] == "0"
    assert refusal.retry_ms is not None


def test_nobody_takes_over_in_mid_stream(impatient: RunningService) -> None:
    with stub_of(impatient) as stub:
        call = stub.StreamGenerate(request_of("abc", labels=HELD), timeout=CALL_SECONDS)
        read(call, 12)
        impatient.worker.stop()
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.reason) == ("ABORTED", "WORKER_LOST")
    assert refusal.metadata["tokens_sent"] == "12"


def test_nobody_takes_over_a_unary_call(impatient: RunningService, wait_until: Any) -> None:
    request = pb.GenerateRequest(spec=request_of("abc", labels=HELD).spec)
    with stub_of(impatient) as stub:
        pending = stub.Generate.future(request, timeout=CALL_SECONDS)
        wait_until(lambda: impatient.value("kvatlas_prompt_tokens_total") > 0, "the start")
        impatient.worker.stop()
        with pytest.raises(grpc.RpcError) as raised:
            pending.result()
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.reason) == ("UNAVAILABLE", "WORKER_LOST")  # nothing was sent
    assert refusal.metadata["tokens_sent"] == "0"


def test_a_request_that_loses_worker_after_worker_is_given_up(running: RunningService, stub: Any) -> None:
    """At most three resumes."""
    labels = {**HELD, "fake.hold_again": "1"}
    call = stub.StreamGenerate(request_of("abcdef", 4000, labels=labels), timeout=CALL_SECONDS)
    read(call, 12)
    for _ in range(3):
        restart(running)
        read(call, 12)
    restart(running)
    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    assert Refusal.of(raised.value).reason == "WORKER_LOST"
    assert max(add.attempt for add in running.worker.adds) == 3


def test_a_request_that_makes_no_progress_is_resumed_once(
    running: RunningService, stub: Any, wait_until: Any
) -> None:
    running.worker.script.step_ms = 60_000  # one token per life at most
    call = stub.StreamGenerate(
        request_of("abcdef", 4000, labels={"fake.wait_ms": "60000"}), timeout=CALL_SECONDS
    )
    for attempt in range(2):
        wait_until(lambda number=attempt: len(running.worker.adds) == number + 1, "the next attempt")
        restart(running)
    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    assert Refusal.of(raised.value).reason == "WORKER_LOST"
    assert len(running.worker.adds) == 2


def test_a_drained_sequence_goes_on_elsewhere_and_keeps_both_bills(tmp_path: Any, wait_until: Any) -> None:
    with (
        running_service(tmp_path, num_workers=2, script=WorkerScript(step_ms=3, drain_at=8)) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        messages = list(stub.StreamGenerate(request_of("abcdef", 30), timeout=CALL_SECONDS))
        assert text_of(messages) == expected("abcdef", 30)
        assert messages[-1].summary.usage.resumes == 1
        assert messages[-1].summary.usage.kv.page_seconds == 3.0
        assert running.value("kvatlas_resumes_total", reason="drain") == 1


def test_samples_drained_one_after_the_other_are_one_attempt(tmp_path: Any) -> None:
    """Six samples, each handed over at a time of its own: more than a request has resumes."""
    with (
        running_service(tmp_path, num_workers=2, script=WorkerScript(step_ms=2)) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        labels = {"fake.drain_at": "5", "fake.drain_apart": "4"}
        request = request_of("abcdef", 60, labels=labels, sampling=pb.SamplingParams(n=6))
        messages = list(stub.StreamGenerate(request, timeout=CALL_SECONDS))
        for index in range(6):
            assert text_of(messages, index) == expected("abcdef", 60, index)
        assert messages[-1].summary.usage.resumes == 6
        assert {add.attempt for add in running.workers[0].adds + running.workers[1].adds} == {0, 1}


def test_a_second_worker_takes_over_at_once(tmp_path: Any) -> None:
    with (
        running_service(tmp_path, num_workers=2, script=WorkerScript(step_ms=0)) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = request_of("abcdefg", 80, labels=HELD)
        calls = [stub.StreamGenerate(request, timeout=CALL_SECONDS) for _ in range(8)]
        messages = [read(call, 12) for call in calls]
        workers = {m[0].started.worker_id for m in messages}
        assert workers == {"worker-0", "worker-1"}  # the load was spread
        running.worker.stop()
        running.workers[1].let_go()
        for call, seen in zip(calls, messages, strict=True):
            seen += list(call)
            assert text_of(seen) == expected("abcdefg", 80)
        running.worker.start()


def test_a_refusal_after_a_loss_is_tried_again_until_the_patience_is_over(
    running: RunningService, impatient: RunningService, wait_until: Any
) -> None:
    def asked(service: RunningService) -> int:
        return sum(1 for add in service.worker.adds if add.attempt)

    request = request_of("abcdef", labels={**HELD, "fake.resume_status": "QUEUE_FULL"})
    with stub_of(running) as stub:
        call = stub.StreamGenerate(request, timeout=CALL_SECONDS)
        read(call, 12)
        restart(running)
        wait_until(lambda: asked(running) >= 4, "more tries")
        call.cancel()
    with stub_of(impatient) as stub:
        call = stub.StreamGenerate(request, timeout=CALL_SECONDS)
        read(call, 12)
        restart(impatient)
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.reason) == ("ABORTED", "WORKER_LOST")
    assert asked(impatient) <= 8  # every 0.2 s for 0.9 s


@pytest.mark.parametrize("fault", ["gap", "silence"])
def test_lost_messages_and_silence_are_a_lost_worker(
    running: RunningService, stub: Any, wait_until: Any, fault: str
) -> None:
    """The seam's rules 3 and 4: the service says Hello again, which ends what it had there."""
    call = stub.StreamGenerate(request_of("abcdefg", 150, labels=HELD), timeout=CALL_SECONDS)
    messages = read(call, 12)
    if fault == "gap":
        running.worker.skips_number = True
    else:
        running.worker.is_silent = True
        pool = running.service.backstage.pool
        wait_until(lambda: not pool.usable, "the worker to be taken for lost")
        running.worker.is_silent = False
    messages += list(call)
    assert text_of(messages) == expected("abcdefg", 150)
    assert len(running.worker.hellos) >= 2
    assert running.worker.hellos[0].service_epoch == running.worker.hellos[1].service_epoch
    assert running.value("kvatlas_resumes_total", reason="partition") == 1


def test_health_and_info_tell_of_a_lost_worker_and_of_its_return(
    running: RunningService, wait_until: Any
) -> None:
    with grpc.insecure_channel(running.address) as channel:
        info = server_pb2_grpc.ServerServiceStub(channel)

        def state() -> int:
            return int(info.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=CALL_SECONDS).state)

        assert state() == server_pb2.SERVER_STATE_SERVING
        running.worker.stop()
        wait_until(lambda: state() == server_pb2.SERVER_STATE_LOST, "the loss")
        worker = info.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=CALL_SECONDS).workers[0]
        assert (worker.worker_id, worker.state) == ("worker-0", server_pb2.SERVER_STATE_LOST)
        load = info.GetLoad(server_pb2.GetLoadRequest(), timeout=CALL_SECONDS).load
        assert load.workers[0].state == server_pb2.SERVER_STATE_LOST
        running.worker.start()
        wait_until(lambda: state() == server_pb2.SERVER_STATE_SERVING, "the return")


def test_cancel_generation_while_no_worker_is_there_ends_normally(
    running: RunningService, stub: Any, wait_until: Any
) -> None:
    request = request_of("abcdef", request_id="homeless", labels=HELD)
    call = stub.StreamGenerate(request, timeout=CALL_SECONDS)
    messages = read(call, 12)
    running.worker.stop()
    live = running.service.backstage.live
    wait_until(lambda: live.everything()[0].run.is_homeless, "the loss to be seen")
    stub.CancelGeneration(pb.CancelGenerationRequest(request_ids=["homeless"]), timeout=CALL_SECONDS)
    messages += list(call)
    finish = [m.choice_finished for m in messages if m.WhichOneof("event") == "choice_finished"]
    assert finish[0].finish_reason == pb.FINISH_REASON_CANCELLED
    assert text_of(messages) == expected("abcdef", finish[0].completion_tokens)


def test_commands_are_answered_in_parts_failed_and_lost(running: RunningService, wait_until: Any) -> None:
    from kvatlas.worker.v1 import worker_pb2
    from service.fleet.link import CommandFailed, WorkerUnavailable
    from service.testing import loop_thread

    (link,) = running.service.backstage.pool.links
    thread = loop_thread()

    async def ask(command: Any, timeout: float) -> list[Any]:
        return [reply async for reply in link.command(command, timeout=timeout)]

    pins = worker_pb2.Command(list_pins=server_pb2.ListPinnedPrefixesRequest())
    assert [r.pins.pins[0].name for r in thread.run(ask(pins, 5))] == ["first", "last"]
    with pytest.raises(CommandFailed) as failed:
        thread.run(ask(worker_pb2.Command(flush=server_pb2.FlushPrefixCacheRequest()), 5))
    assert failed.value.code == 9
    unanswered = worker_pb2.Command(profile=server_pb2.CaptureProfileRequest())
    with pytest.raises(TimeoutError):
        thread.run(ask(unanswered, 0.05))
    outcome: list[BaseException] = []

    def ask_and_lose() -> None:
        try:
            thread.run(ask(unanswered, 20))
        except WorkerUnavailable as error:
            outcome.append(error)

    waiting = threading.Thread(target=ask_and_lose)
    waiting.start()
    wait_until(lambda: link._desk.under_way, "the command under way")
    running.worker.stop()
    waiting.join(10)
    assert len(outcome) == 1
