"""Rows of docs/errors.md for answers that are called off, and for servers that drain or are not ready."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import server_pb2
from service.testing import RunningService, loop_thread
from service.testing_callers import SECONDS, Caller, Told, both, told
from service.testing_fleet import wait_for
from tests.status_stack import CONTEXT, TOKENS, Row, Stack, cases_of, check_row, slow, spec_of


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with ExitStack() as cleanup:
        yield Stack(tmp_path_factory.mktemp("rows"), cleanup)


def client_cancels(stack: Stack) -> Told:
    call = stack.user.stream(slow(CONTEXT - 8))
    assert next(call).WhichOneof("event") == "started"
    call.cancel()
    return Told(call.code().name)


def draining(stack: Stack) -> Told:
    running, channel, admin = stack.service()
    wait_for(lambda: running.service.backstage.pool.usable, "the worker")
    root, end = Caller(channel, admin, TOKENS["root"]), _served(running)
    first = root.stream(slow(4))
    assert next(first).WhichOneof("event") == "started"
    assert root.StartDrain(server_pb2.StartDrainRequest()).running_requests == 1
    refusal = both(root, spec_of())
    assert list(first)[-1].WhichOneof("event") == "summary"
    end.result(SECONDS)
    return refusal


def drain_taken_back(stack: Stack) -> Told:
    running, channel, admin = stack.service(drain_listen=600.0)
    wait_for(lambda: running.service.backstage.pool.usable, "the worker")
    root, end = Caller(channel, admin, TOKENS["root"]), _served(running)
    root.StartDrain(server_pb2.StartDrainRequest())
    assert both(root, spec_of()).reason == "DRAINING"
    root.StopDrain(server_pb2.StopDrainRequest())
    assert root.generate(spec_of()).usage.completion_tokens == 4
    assert not end.done()
    end.cancel()
    return Told("OK")


def grace_over(stack: Stack) -> Told:
    running, channel, admin = stack.service()
    wait_for(lambda: running.service.backstage.pool.usable, "the worker")
    root, end = Caller(channel, admin, TOKENS["root"]), _served(running)
    first = root.stream(slow(CONTEXT - 8))
    while next(first).WhichOneof("event") != "delta":
        pass
    root.StartDrain(server_pb2.StartDrainRequest(grace=Duration(nanos=1)))
    refusal = told(lambda: first)
    assert int(refusal.metadata["tokens_sent"]) >= 1
    end.result(SECONDS)
    return refusal


def _served(running: RunningService) -> "Future[None]":
    return asyncio.run_coroutine_threadsafe(running.service.serve(), loop_thread().loop)


def not_ready(stack: Stack) -> Told:
    _, channel, admin = stack.service(workers=(f"ipc://{stack.folder}/nobody",))
    return both(Caller(channel, admin, TOKENS["user"]), spec_of())


def cancel_generation(stack: Stack) -> Told:
    """It ends with what it has and its bill; ids of others are unknown."""
    call = stack.user.stream(slow(CONTEXT - 8, request_id="mine"))
    while next(call).WhichOneof("event") != "delta":
        pass
    ids = pb.CancelGenerationRequest(request_ids=["mine", "none"])
    assert list(stack.other.CancelGeneration(ids).unknown_ids) == ["mine", "none"]
    answer = stack.user.CancelGeneration(ids)
    assert (list(answer.cancelled_ids), list(answer.unknown_ids)) == (["mine"], ["none"])
    rest = list(call)
    finished = next(each for each in rest if each.WhichOneof("event") == "choice_finished").choice_finished
    assert finished.finish_reason == pb.FINISH_REASON_CANCELLED
    assert rest[-1].summary.usage.kv.page_seconds > 0
    return Told("OK")


def cancel_requests(stack: Stack) -> Told:
    """By whom, by label, by id, or all of it: only what fits everything that is named."""
    calls: Sequence[Any] = [
        stack.user.stream(slow(CONTEXT - 8, request_id="one", labels={"job": "a"})),
        stack.other.stream(slow(CONTEXT - 8, request_id="one", labels={"job": "b"})),
    ]
    for call in calls:
        assert next(call).WhichOneof("event") == "started"
    cancel = stack.root.CancelRequests
    ask = server_pb2.CancelRequestsRequest
    assert not cancel(ask(request_ids=["two"])).cancelled_ids
    assert not cancel(ask(principal="user", labels={"job": "b"})).cancelled_ids
    assert list(cancel(ask(principal="user", reason="too loud")).cancelled_ids) == ["one"]
    first = told(lambda: calls[0])
    assert list(cancel(ask(labels={"job": "b"})).cancelled_ids) == ["one"]
    second = told(lambda: calls[1])
    assert (first.status, first.reason) == (second.status, second.reason)
    return first


ROWS_OF_TABLE = (
    Row(client_cancels, "CANCELLED"),
    Row(draining, "UNAVAILABLE", "DRAINING", ("request_id",), retry_ms=100, pushback="100"),
    Row(drain_taken_back, "OK"),
    Row(grace_over, "UNAVAILABLE", "DRAINING", ("tokens_sent", "request_id"), retry_ms=100, pushback="100"),
    Row(not_ready, "UNAVAILABLE", "NOT_READY", ("request_id",), retry_ms=1000, pushback="1000"),
    Row(cancel_generation, "OK"),
    Row(cancel_requests, "CANCELLED", "CANCELLED_BY_OPERATOR", ("request_id",)),
)  # fmt: skip


@pytest.mark.parametrize("row", cases_of(ROWS_OF_TABLE))
def test_a_situation_gets_its_status_and_leaves_nothing(stack: Stack, row: Row) -> None:
    check_row(stack, row)
