"""A client goes away while a real worker on the CPU has its request: queued, in its prompt, between tokens.

By cancel, deadline, closed channel and SIGKILL. The worker hears of it once, and nothing is left there.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest

from kvatlas.cli.config import child_environment
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc
from service.fleet import codec
from service.request import AbortReason
from service.testing_fleet import Fleet, running_fleet, spec_of

pytestmark = pytest.mark.slow
CALL_SECONDS = 600.0  # only ends a test that hangs
DEADLINE_SECONDS = 8.0  # enough for the request to come into its phase
# Two rows, one for the request that makes steps slow; a prompt of many steps.
FLAGS = ("--num-pages", "600", "--max-running", "2", "--max-batch-tokens", "32", "--debug-faults", "requests")
CLIENT = """
import sys, grpc
from kvatlas.v1 import generation_pb2 as pb, generation_pb2_grpc
request = pb.StreamGenerateRequest.FromString(bytes.fromhex(sys.argv[2]))
list(generation_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(sys.argv[1])).StreamGenerate(request))
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), *FLAGS, count=1) as made:
        yield made


@pytest.fixture
def aborts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], AbortReason]]:
    """What was sent to the worker, by ids and reason."""
    sent: list[tuple[list[int], AbortReason]] = []
    encode = codec.encode_abort

    def recorded(sequence_ids: Sequence[int], reason: AbortReason) -> bytes:
        sent.append((list(sequence_ids), reason))
        return encode(sequence_ids, reason)

    monkeypatch.setattr(codec, "encode_abort", recorded)
    return sent


def is_in(fleet: Fleet, phase: str, request_id: str) -> bool:
    """Whether the request has come so far."""
    call = fleet.running.service.backstage.live.find(request_id, "")
    run = call.run if call is not None else None
    if run is None or run.outcome is None:
        return False
    has_tokens = any(choice.box.tokens for choice in run.choices)
    return {
        "queue": run.start is None,
        "prefill": run.start is not None and not has_tokens,
        "decode": has_tokens,
    }[phase]


def start_client(fleet: Fleet, request: pb.StreamGenerateRequest, means: str) -> Callable[[], None]:
    """Begins the call; the result makes its client go away."""
    if means == "sigkill":
        arguments = [fleet.running.address, request.SerializeToString().hex()]
        client = subprocess.Popen([sys.executable, "-c", CLIENT, *arguments], env=child_environment())

        def kill() -> None:
            client.send_signal(signal.SIGKILL)
            client.wait(CALL_SECONDS)

        return kill
    channel = grpc.insecure_channel(fleet.running.address)
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    timeout = DEADLINE_SECONDS if means == "deadline" else CALL_SECONDS
    call = stub.StreamGenerate(request, timeout=timeout)

    def leave() -> None:
        if means == "cancel":
            call.cancel()
        elif means == "deadline":
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        channel.close()

    return leave


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
@pytest.mark.parametrize("means", ["cancel", "deadline", "close", "sigkill"])
def test_whoever_goes_away_is_aborted_once_and_leaves_nothing(
    fleet: Fleet,
    aborts: list[tuple[list[int], AbortReason]],
    wait_until: Callable[..., None],
    phase: str,
    means: str,
) -> None:
    holders: list[Any] = [fleet.slow(4000)]
    if phase == "queue":
        holders.append(fleet.stream(spec_of("has the other row", 4000)))
        assert next(holders[-1]).WhichOneof("event") == "started"
    text = "a long prompt " * 200 if phase == "prefill" else "a short prompt"
    request_id = f"{phase}-{means}"
    request = pb.StreamGenerateRequest(spec=spec_of(text, 2000, request_id=request_id))
    request.spec.cache.read = False  # or the prompt would be found from the second time on
    leave = start_client(fleet, request, means)
    wait_until(lambda: is_in(fleet, phase, request_id), f"the request in {phase}")
    leave()
    live = fleet.running.service.backstage.live
    wait_until(lambda: live.find(request_id, "") is None, "the end of the call")
    mine = list(aborts)
    for holder in holders:
        holder.cancel()
    wait_until(lambda: fleet.running.is_idle, "an idle service")
    wait_until(lambda: fleet.active_pages("worker-0") == 0, "the pages to be free")
    (link,) = fleet.running.service.backstage.pool.links
    wait_until(lambda: link.beat is not None and not link.beat.running_sequences, "nothing to run")
    assert len(aborts) == len(mine) + len(holders)  # and none for the second time later on
    if means == "deadline":  # the worker keeps it as well, and may have been first
        assert len(mine) <= 1
        assert all(reason is AbortReason.DEADLINE for _, reason in mine)
    else:
        assert [(len(ids), reason) for ids, reason in mine] == [(1, AbortReason.CLIENT)]
