"""However a client goes away, the worker hears of it exactly once and nothing is left.

B105: the handler may be waiting for the engine, between two messages, or not have sent anything yet.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc
from service.request import AbortReason
from service.testing import RunningService, running_service
from service.testing_worker import WorkerScript

ROOT = Path(__file__).resolve().parents[2]
CALL_SECONDS = 120.0  # ends a call that hangs
PHASES = {
    "queue": {"fake.wait_ms": "600000"},  # before anything was sent
    "prefill": {"fake.step_ms": "600000"},  # started and one token, then silence: waiting for the engine
    "decode": {"fake.step_ms": "30"},  # between messages; two minutes of them
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("cancel"), script=WorkerScript(step_ms=3)) as service:
        yield service


@pytest.fixture(autouse=True)
def exactly_one_abort(running: RunningService, wait_until: Any) -> Iterator[None]:
    """Each test here makes one call that goes away."""
    running.worker.aborts.clear()
    yield
    wait_until(lambda: running.is_idle, "idle service and worker")
    assert len(running.worker.aborts) == 1, running.worker.aborts
    ((ids, _),) = running.worker.aborts
    assert len(ids) == len(set(ids))


def request_of(phase: str, n: int = 1) -> pb.StreamGenerateRequest:
    spec = pb.GenerationSpec(
        text="abcdef",
        stop=pb.StopCriteria(max_tokens=4000),
        labels=PHASES[phase],
        sampling=pb.SamplingParams(n=n),
    )
    return pb.StreamGenerateRequest(spec=spec)


def wait_for_phase(running: RunningService, wait_until: Any, phase: str, call: Any) -> None:
    """Until the worker has it, and for the later phases until the client has seen the start."""
    wait_until(lambda: running.worker.live_sequences, "the request on the worker")
    if phase != "queue":
        assert next(call).WhichOneof("event") == "started"
        next(call)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("n", [1, 3])
def test_a_cancelled_stream_is_aborted_once_in_every_phase(
    running: RunningService, wait_until: Any, phase: str, n: int
) -> None:
    """B105, H10: detokenizer state and mailboxes go with the call."""
    before = running.value("kvatlas_requests_total", outcome="cancelled")
    with grpc.insecure_channel(running.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.StreamGenerate(request_of(phase, n), timeout=CALL_SECONDS)
        wait_for_phase(running, wait_until, phase, call)
        (live,) = running.service.backstage.live.everything()
        call.cancel()
        wait_until(lambda: running.worker.aborts, "an abort")
    ((ids, reason),) = running.worker.aborts
    assert reason == AbortReason.CLIENT
    assert len(ids) == n
    wait_until(
        lambda: running.value("kvatlas_requests_total", outcome="cancelled") == before + 1, "the outcome"
    )
    assert live.run is not None
    for choice in live.run.choices:
        assert choice._answer is None
        assert choice.box.scores is None
        assert not choice.box.tokens


@pytest.mark.parametrize("phase", PHASES)
def test_a_cancelled_unary_call_is_aborted_once(running: RunningService, wait_until: Any, phase: str) -> None:
    with grpc.insecure_channel(running.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        pending = stub.Generate.future(pb.GenerateRequest(spec=request_of(phase).spec), timeout=CALL_SECONDS)
        wait_until(lambda: running.worker.live_sequences, "the request on the worker")
        pending.cancel()
        wait_until(lambda: running.worker.aborts, "an abort")
    assert running.worker.aborts[0][1] == AbortReason.CLIENT


@pytest.mark.parametrize("phase", PHASES)
def test_a_closed_channel_is_an_abort(running: RunningService, wait_until: Any, phase: str) -> None:
    channel = grpc.insecure_channel(running.address)
    call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(
        request_of(phase), timeout=CALL_SECONDS
    )
    wait_for_phase(running, wait_until, phase, call)
    channel.close()
    wait_until(lambda: running.worker.aborts, "an abort")


@pytest.mark.parametrize("phase", PHASES)
def test_a_deadline_is_an_abort(running: RunningService, wait_until: Any, phase: str) -> None:
    with grpc.insecure_channel(running.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        before, seconds = len(running.worker.adds), 0.4
        while len(running.worker.adds) == before:  # on a busy machine it may pass on its way to the worker
            call = stub.StreamGenerate(request_of(phase), timeout=seconds)
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            wait_until(lambda: running.is_idle, "the end of the call")
            seconds *= 2
        wait_until(lambda: running.worker.aborts, "an abort")
    # The client's clock may be ahead: then its cancel comes first. Strictly: test_status_table.
    assert running.worker.aborts[0][1] in (AbortReason.DEADLINE, AbortReason.CLIENT)


CLIENT = """
import sys, grpc
from kvatlas.v1 import generation_pb2 as pb, generation_pb2_grpc
request = pb.StreamGenerateRequest.FromString(bytes.fromhex(sys.argv[2]))
call = generation_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(sys.argv[1])).StreamGenerate(request)
for message in call:
    print(message.WhichOneof("event"), flush=True)
"""


def test_a_killed_client_is_an_abort(running: RunningService, wait_until: Callable[..., None]) -> None:
    arguments = [running.address, request_of("decode").SerializeToString().hex()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "protos")}
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, *arguments], stdout=subprocess.PIPE, env=environment, text=True
    )
    assert client.stdout is not None
    with client.stdout:
        assert client.stdout.readline().strip() == "started"
        assert client.stdout.readline().strip() == "delta"
        client.send_signal(signal.SIGKILL)
        client.wait(CALL_SECONDS)
        wait_until(lambda: running.worker.aborts, "an abort")
    assert running.worker.aborts[0][1] == AbortReason.CLIENT


def test_a_cancel_while_the_prompt_is_tokenized_sends_nothing(
    running: RunningService, wait_until: Callable[..., None]
) -> None:
    """The abort counted here is of the request that follows: the cancelled one never was on a worker."""
    release = threading.Event()
    prompts = running.service.backstage.prompts
    encode = prompts.tokenizer.encode
    entered = threading.Event()

    def slow_encode(text: str, **options: bool) -> list[int]:
        entered.set()
        assert release.wait(60)
        return encode(text, **options)

    before = len(running.worker.adds)
    prompts.tokenizer.encode = slow_encode  # type: ignore[method-assign]
    try:
        with grpc.insecure_channel(running.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            spec = pb.GenerationSpec(text="x" * 2000, stop=pb.StopCriteria(max_tokens=3))
            pending = stub.Generate.future(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
            assert entered.wait(60)
            pending.cancel()
            wait_until(lambda: running.is_idle, "the end of the call")
    finally:
        release.set()
        del prompts.tokenizer.encode
    assert len(running.worker.adds) == before
    with grpc.insecure_channel(running.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.StreamGenerate(request_of("decode"), timeout=CALL_SECONDS)
        next(call)
        call.cancel()
        wait_until(lambda: running.worker.aborts, "an abort")
