"""Rows of docs/errors.md for queues, quotas and time: who must wait, for how long, and who may not."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kvatlas.v1 import cache_pb2, generation_pb2_grpc, server_pb2
from kvatlas.v1 import generation_pb2 as pb
from service.testing_callers import SECONDS, Caller, Told, both, told
from service.testing_fleet import wait_for
from tests.held_tokenizer import HELD, HeldTokenizer
from tests.status_stack import (
    CONTEXT,
    FIVE_ATTEMPTS,
    QUEUE,
    TOKENS,
    Row,
    Stack,
    cases_of,
    check_row,
    slow,
    spec_of,
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with ExitStack() as cleanup:
        yield Stack(tmp_path_factory.mktemp("rows"), cleanup)


def queue_full(stack: Stack) -> Told:
    with stack.busy(QUEUE):
        refusal = both(stack.user, spec_of())
        assert 50 <= int(refusal.pushback or 0) <= 5000
        assert refusal.retry_ms == int(refusal.pushback or 0)
        return refusal


def queue_full_third_attempt(stack: Stack) -> Told:
    names = [{"service": "kvatlas.v1.GenerationService"}]
    config = json.dumps({"methodConfig": [{"name": names, "retryPolicy": FIVE_ATTEMPTS}]})
    options = [("grpc.service_config", config), ("grpc.enable_retries", 1)]
    with stack.busy(QUEUE), grpc.insecure_channel(stack.running.address, options) as channel:
        return told(lambda: Caller(channel, stack.admin, TOKENS["user"]).generate(spec_of()))


def quota_of_active(stack: Stack) -> Told:
    capped = stack.caller("capped")
    calls = []
    try:
        for _ in range(2):
            calls.append(capped.stream(slow(CONTEXT - 8)))
            assert next(calls[-1]).WhichOneof("event") == "started"
        return both(capped, spec_of())
    finally:
        for call in calls:
            call.cancel()


def quota_of_queued(stack: Stack) -> Told:
    capped = stack.caller("capped")
    with stack.busy():
        waiting = capped.stream(spec_of("waits"), queue_updates=True)
        assert next(waiting).WhichOneof("event") == "queued"
        refusal = both(capped, spec_of())
        waiting.cancel()
    return refusal


def quota_of_text_calls(stack: Stack) -> Told:
    """Counted apart from generations: these go on."""
    tokenizer = HeldTokenizer.toy()
    running, channel, admin = stack.service(tokenizer=tokenizer)
    wait_for(lambda: running.service.backstage.pool.usable, "the worker")
    capped, user = (Caller(channel, admin, TOKENS[name]) for name in ("capped", "user"))
    held = pb.TokenizeRequest(text=HELD)
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
    calls = [stub.Tokenize.future(held, timeout=SECONDS, metadata=capped.metadata) for _ in range(2)]
    try:
        wait_for(lambda: running.service.backstage.text_calls.active == 2, "two calls")
        refusal = told(lambda: capped.Tokenize(pb.TokenizeRequest(text="abc")))
        ids = pb.DetokenizeRequest(token_ids=[65])
        assert told(lambda: capped.Detokenize(ids)) == refusal
        assert user.Detokenize(ids).text == "A"
        assert capped.generate(spec_of()).usage.completion_tokens == 4
    finally:
        tokenizer.go_on.set()
    assert [call.result().token_count for call in calls] == [len(HELD)] * 2
    wait_for(lambda: not running.service.backstage.text_calls.active, "their end")
    assert capped.Detokenize(ids).text == "A"
    return refusal


def queue_timeout(stack: Stack) -> Told:
    limit = pb.SchedulingOptions(queue_timeout=Duration(nanos=300_000_000))
    with stack.busy():
        return both(stack.user, spec_of("waits", scheduling=limit))


def too_many_watches(stack: Stack) -> Told:
    watches = [stack.user.WatchLoad(server_pb2.WatchLoadRequest()) for _ in range(2)]
    for watch in watches:
        next(watch)
    refusal = told(lambda: stack.user.WatchPageMap(cache_pb2.WatchPageMapRequest()))
    for watch in watches:
        watch.cancel()
    wait_for(lambda: not stack.running.service.backstage.watches.active, "the end of the watches")
    return refusal


def deadline_too_short(stack: Stack) -> Told:
    """The worker knows its waits after some admissions out of a queue."""
    for _ in range(2):
        for call in [stack.root.stream(slow(1)) for _ in range(QUEUE)]:
            list(call)
    with stack.busy(QUEUE - 1):
        refusal = both(stack.user, spec_of(), timeout=1.0)
        assert int(refusal.metadata["estimated_wait_ms"]) > 1000
        wait_for(
            lambda: stack.root.GetLoad(server_pb2.GetLoadRequest()).load.HasField("estimated_wait"), "load"
        )
    return refusal


def deadline_in_queue(stack: Stack) -> Told:
    with stack.busy():
        return told(lambda: stack.user.stream(spec_of("waits"), timeout=1.0))


def deadline_while_running(stack: Stack) -> Told:
    return told(lambda: stack.user.stream(slow(CONTEXT - 8), timeout=1.5))


def no_deadline(stack: Stack) -> Told:
    running, channel, admin = stack.service(default_deadline=1.5, max_deadline=1.5)
    wait_for(lambda: running.service.backstage.pool.usable, "the worker")
    caller = Caller(channel, admin, TOKENS["user"])
    cut = told(lambda: caller.generate(slow(CONTEXT - 8), timeout=SECONDS))
    none = told(lambda: caller.stream(slow(CONTEXT - 8), timeout=None))
    assert (none.status, none.reason) == (cut.status, cut.reason)
    return none


def max_duration(stack: Stack) -> Told:
    spec = slow(CONTEXT - 8)
    spec.stop.max_duration.FromMilliseconds(700)
    response = stack.user.generate(spec)
    assert response.choices[0].finish_reason == pb.FINISH_REASON_TIME_LIMIT
    assert 1 <= response.usage.completion_tokens < CONTEXT - 8
    return Told("OK")


ROWS_OF_TABLE = (
    Row(queue_full, "UNAVAILABLE", "QUEUE_FULL", ("request_id",)),
    Row(queue_full_third_attempt, "UNAVAILABLE", "QUEUE_FULL", ("request_id",), pushback="-1"),
    Row(quota_of_active, "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", ("limit", "value", "request_id"),
        retry_ms=1000, quota="principal:capped"),
    Row(quota_of_queued, "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", ("limit", "value", "request_id"),
        retry_ms=1000, quota="principal:capped"),
    Row(quota_of_text_calls, "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", ("limit", "value"),
        retry_ms=1000, quota="principal:capped"),
    Row(queue_timeout, "RESOURCE_EXHAUSTED", "QUEUE_TIMEOUT", ("request_id",), retry_ms=1000),
    Row(too_many_watches, "RESOURCE_EXHAUSTED", "WATCH_LIMIT", retry_ms=1000),
    Row(deadline_too_short, "DEADLINE_EXCEEDED", "DEADLINE_TOO_SHORT",
        ("estimated_wait_ms", "request_id"), is_slow=True),
    Row(deadline_in_queue, "DEADLINE_EXCEEDED"),
    Row(deadline_while_running, "DEADLINE_EXCEEDED"),
    Row(no_deadline, "DEADLINE_EXCEEDED", "DEADLINE_PASSED", ("request_id",)),
    Row(max_duration, "OK"),
)  # fmt: skip


@pytest.mark.parametrize("row", cases_of(ROWS_OF_TABLE))
def test_a_situation_gets_its_status_and_leaves_nothing(stack: Stack, row: Row) -> None:
    check_row(stack, row)
