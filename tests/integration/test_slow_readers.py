"""A reader that does not read costs the others nothing and the service little, and not for long."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc
from service.handlers import sizes
from service.testing import OWN_CONNECTION, Refusal, RunningService, running_service
from service.testing_fleet import running_fleet, spec_of, tokens_of
from service.testing_worker import WorkerScript

# Windows do not grow by probing: what a client does not read fills them after some hundred messages.
CALL_SECONDS = 600.0  # only ends a test that hangs
SMALL_WINDOWS = [("grpc.http2.bdp_probe", 0)]


@pytest.fixture
def running(tmp_path: Any) -> Iterator[RunningService]:
    script = WorkerScript(step_ms=0, max_context=100_000)
    with running_service(tmp_path, script=script, slow_reader_seconds=0.6) as service:
        yield service


@pytest.fixture
def patient(tmp_path: Any) -> Iterator[RunningService]:
    script = WorkerScript(step_ms=0, max_context=100_000)
    with running_service(tmp_path, script=script, slow_reader_seconds=600.0) as service:
        yield service


def big_request(max_tokens: int = 900) -> pb.StreamGenerateRequest:
    """Messages of some hundred bytes each."""
    spec = pb.GenerationSpec(
        text="abcdefgh", stop=pb.StopCriteria(max_tokens=max_tokens), output=pb.OutputOptions(logprobs=20)
    )
    return pb.StreamGenerateRequest(spec=spec)


def test_a_reader_that_takes_nothing_loses_its_place_first_and_then_its_call(
    running: RunningService, wait_until: Any
) -> None:
    with grpc.insecure_channel(running.address, SMALL_WINDOWS) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(big_request(), timeout=120)
        next(call)
        wait_until(lambda: running.value("kvatlas_generated_tokens_total") > 100, "tokens on the way")
        wait_until(lambda: running.is_idle, "the place to be given back")
        assert running.value("kvatlas_stream_slow_readers_total") == 1
        assert running.value("kvatlas_requests_total", outcome="failed") == 1
        assert running.value("kvatlas_stream_send_blocked_seconds_total") >= 0.5
        assert running.value("kvatlas_stream_queue_tokens") == 0
        assert not call.done()  # a status cannot overtake what was not read
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "SLOW_READER")
    assert 0 < int(refusal.metadata["tokens_sent"]) < 900


def test_a_late_reader_gets_everything_in_larger_messages(patient: RunningService, wait_until: Any) -> None:
    running = patient
    with grpc.insecure_channel(running.address, SMALL_WINDOWS) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(big_request(), timeout=120)
        next(call)
        wait_until(lambda: running.worker.adds and not running.worker.live_sequences, "the end on the worker")
        wait_until(
            lambda: running.value("kvatlas_stream_queue_tokens") > 100, "tokens that wait for the reader"
        )
        messages = list(call)
    deltas = [message.delta for message in messages if message.WhichOneof("event") == "delta"]
    assert sum(delta.token_count for delta in deltas) == 900
    assert len(deltas) < 800
    most = sizes.ENTRIES_PER_MESSAGE // 21  # a token and its 20 alternatives
    assert max(delta.token_count for delta in deltas) == most
    assert messages[-1].WhichOneof("event") == "summary"
    assert running.value("kvatlas_stream_merges_total") >= 900 - len(deltas)


def test_readers_that_leave_while_a_message_is_under_way_are_no_failures(
    patient: RunningService, wait_until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Core fails the write before it cancels the call: half of them were told and counted as bugs."""
    running, before = patient, {}
    for outcome in ("failed", "cancelled"):
        before[outcome] = running.value("kvatlas_requests_total", outcome=outcome)
    for _ in range(4):
        with grpc.insecure_channel(running.address, [*SMALL_WINDOWS, OWN_CONNECTION]) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            calls = [stub.StreamGenerate(big_request(), timeout=120) for _ in range(15)]
            for call in calls:
                next(call)
            wait_until(lambda: running.value("kvatlas_stream_queue_tokens") > 100, "readers that are late")
    wait_until(lambda: running.is_idle, "their end")
    assert running.value("kvatlas_requests_total", outcome="failed") == before["failed"]
    assert running.value("kvatlas_requests_total", outcome="cancelled") == before["cancelled"] + 60
    assert "event=bug" not in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_readers_that_do_not_read_do_not_hold_up_those_that_do(tmp_path: Any, wait_until: Any) -> None:
    """Four readers beside twenty that never read keep at least 70 % of the rate that they have alone.

    With a real worker on the CPU. What the twenty do not take waits in mailboxes of a known size until their
    time is up. Alone is measured before and after: other work on the machine may begin or end meanwhile.
    """
    flags = ("--num-pages", "1500", "--max-running", "32")
    with running_fleet(tmp_path, *flags, count=1, slow_reader_seconds=30.0) as fleet:
        running = fleet.running

        def read_four() -> float:
            began = time.monotonic()
            calls = [fleet.stream(spec_of(f"reader {number}", 400)) for number in range(4)]
            for call in calls:
                assert len(tokens_of(list(call))) == 400
            return time.monotonic() - began

        before = min(read_four() for _ in range(3))
        with grpc.insecure_channel(running.address, SMALL_WINDOWS) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            request = big_request(500)
            request.spec.stop.ignore_eos = True
            stuck = [stub.StreamGenerate(request, timeout=CALL_SECONDS) for _ in range(20)]
            for call in stuck:
                next(call)
            links = running.service.backstage.pool.links
            wait_until(lambda: not any(link.live_sequences for link in links), "their end on the worker")
            waiting = running.value("kvatlas_stream_queue_tokens")
            assert 20 < waiting <= 20 * 500
            beside = min(read_four() for _ in range(3))
            assert len(running.service.backstage.live) == 20
            wait_until(
                lambda: running.value("kvatlas_stream_slow_readers_total") == 20, "their time to be up"
            )
            wait_until(lambda: running.is_idle, "an idle service, before anybody reads")
            for call in stuck:
                with pytest.raises(grpc.RpcError) as raised:
                    list(call)
                assert Refusal.of(raised.value).reason == "SLOW_READER"
        after = min(read_four() for _ in range(3))
        print(f"rate kept: {before / beside:.2f} and {after / beside:.2f}, {waiting:.0f} tokens in mailboxes")
        assert beside < max(before, after) / 0.7


@pytest.mark.slow
def test_a_client_that_leaves_while_its_status_is_held_up_ends_the_handler(
    running: RunningService, wait_until: Any
) -> None:
    before = threading.active_count()
    channel = grpc.insecure_channel(running.address, SMALL_WINDOWS)
    call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(big_request(), timeout=120)
    next(call)
    wait_until(lambda: running.value("kvatlas_stream_slow_readers_total") == 1, "the slow reader's end")
    series = {
        "grpc_type": "server_stream",
        "grpc_service": "kvatlas.v1.GenerationService",
        "grpc_method": "StreamGenerate",
    }
    assert running.value("grpc_server_handling_seconds_count", **series) == 0
    channel.close()
    wait_until(
        lambda: running.value("grpc_server_handling_seconds_count", **series) == 1, "the handler's end"
    )
    wait_until(lambda: threading.active_count() <= before, "no thread left over")
