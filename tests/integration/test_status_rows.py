"""Rows of docs/errors.md that one worker on the CPU can show: status, reason, details, and idle afterwards.

Everything here is real but the model's weights: two principals' tokens, an operator's listener, a pool of 64
pages, two rows and a queue of twelve. A prompt of SLOW makes every step of the worker take half a second for
as long as it runs, so what is to be seen can be seen on any machine. Rows that take another worker or its
death are in test_worker_failures.py and test_lost_workers.py; docs/errors.md says which test shows which.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kvatlas.v1 import (
    cache_pb2,
    server_pb2,
    server_pb2_grpc,
)
from kvatlas.v1 import generation_pb2 as pb
from service.testing import RunningService, loop_thread, running_service
from service.testing_callers import SECONDS, Caller, Told, both, raw, told
from service.testing_fleet import FAULTY_TOKENS, WorkerProcess, wait_for
from service.testing_worker import ScriptedWorker

PAGES, ROWS, QUEUE = 64, 2, 12
CONTEXT = PAGES * 16
SLOW = chr(FAULTY_TOKENS["slow_steps"]) * 8
BREAKS_STEP = chr(FAULTY_TOKENS["breaks_step"]) * 8
TOKENS = {
    "user": "user-a1",
    "other": "other-b2",
    "capped": "capped-c3",
    "looker": "looker-d4",
    "root": "root-e5",
}
SCOPES = {
    "user": '["generate", "cache.read"]',
    "other": '["generate", "cache.read"]',
    "capped": '["generate"]\nmax_active_requests = 2\nmax_queued_requests = 1',
    "looker": '["cache.read"]',
    "root": '["generate", "cache.read", "priority", "admin"]',
}


class Stack:
    """One worker and the services before it."""

    def __init__(self, folder: Path, cleanup: ExitStack) -> None:
        self._folder = folder
        self._cleanup = cleanup
        self._count = 0
        auth = folder / "auth.toml"
        auth.touch(mode=0o600)
        auth.write_text("\n".join(_entry(name) for name in TOKENS))
        self._auth = str(auth)
        flags: tuple[str, ...] = (
            "--num-pages",
            str(PAGES),
            "--max-running",
            str(ROWS),
            "--max-queued",
            str(QUEUE),
        )
        flags += ("--debug-faults", "requests", "--recordings", str(folder / "recordings"))
        self.worker = WorkerProcess(folder, "worker-0", *flags, "--profiles", str(folder / "profiles"))
        self.worker.start()
        cleanup.callback(self.worker.kill)
        self.running, self.channel, self.admin = self.service(max_watches=2)
        wait_for(lambda: self.running.service.backstage.pool.usable, "the worker", [self.worker])
        self.user, self.other, self.root = self.caller("user"), self.caller("other"), self.caller("root")
        wait_for(self.has_map, "the page map", [self.worker])

    def service(self, **settings: Any) -> tuple[RunningService, grpc.Channel, grpc.Channel]:
        """Another service before the worker, with channels to both of its listeners."""
        self._count += 1
        settings.setdefault("workers", (self.worker.address,))
        running = self._cleanup.enter_context(
            running_service(
                self._folder,
                num_workers=0,
                ready=False,
                instance_id=f"service-{self._count}",
                auth_file=self._auth,
                admin_address="127.0.0.1:0",
                **settings,
            )
        )
        channels = [
            self._cleanup.enter_context(grpc.insecure_channel(address))
            for address in (running.address, f"127.0.0.1:{running.service.admin_port}")
        ]
        return running, channels[0], channels[1]

    def caller(self, name: str) -> Caller:
        return Caller(self.channel, self.admin, TOKENS.get(name, ""))

    def has_map(self) -> bool:
        try:
            self.root.GetPagePool(cache_pb2.GetPagePoolRequest())
        except grpc.RpcError:
            return False
        return True

    def worker_load(self) -> server_pb2.WorkerLoad:
        load: server_pb2.WorkerLoad = self.root.GetLoad(server_pb2.GetLoadRequest()).load.workers[0]
        return load

    # What is held, so that others wait

    @contextmanager
    def busy(self, queued: int = 0) -> Iterator[list[Any]]:
        """All rows taken by streams that run on slowly, and so many that wait behind them."""
        calls = [self.root.stream(slow(CONTEXT - 8), queue_updates=True) for _ in range(ROWS)]
        try:
            for call in calls:
                while next(call).WhichOneof("event") != "started":
                    pass
            # The worker looks at what has come between two slow steps: all of them at once.
            waiting = [self.root.stream(spec_of("waits"), queue_updates=True) for _ in range(queued)]
            calls += waiting
            positions = [next(call).queued.position for call in waiting]
            assert sorted(positions) == list(range(queued)), "each is told its own place"
            yield calls
        finally:
            for call in calls:
                call.cancel()

    def is_idle(self) -> bool:
        if not self.running.is_idle:
            return False
        pool = self.root.GetPagePool(cache_pb2.GetPagePoolRequest())
        load = self.worker_load()
        return not (pool.stats.active_pages or load.waiting_requests or load.running_sequences)

    def steps_since_release(self) -> int:
        """Engine steps after the one at whose boundary the last page came back."""
        (row,) = self.root.GetPageTable(cache_pb2.GetPageTableRequest(rows=[0]))
        pool = self.root.GetPagePool(cache_pb2.GetPagePoolRequest())
        return int(row.step) - 1 - int(pool.revision.step)


def _entry(name: str) -> str:
    digest = hashlib.sha256(TOKENS[name].encode()).hexdigest()
    head = f'[[principal]]\nname = "{name}"\ntenant = "{name}"\ntoken_sha256 = ["{digest}"]'
    return f"{head}\nscopes = {SCOPES[name]}\n"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with ExitStack() as cleanup:
        yield Stack(tmp_path_factory.mktemp("rows"), cleanup)


def spec_of(text: str = "abc", max_tokens: int = 4, **more: Any) -> pb.GenerationSpec:
    spec = pb.GenerationSpec(text=text, sampling=pb.SamplingParams(temperature=0), **more)
    spec.stop.ignore_eos = True
    spec.stop.max_tokens = max_tokens
    return spec


def slow(max_tokens: int, **more: Any) -> pb.GenerationSpec:
    return spec_of(SLOW, max_tokens, **more)


# The rows, in the order of the table


def invalid_field(stack: Stack) -> Told:
    spec = spec_of()
    spec.sampling.temperature, spec.sampling.top_p = float("nan"), 2
    spec.output.format = 77  # type: ignore[assignment]
    return both(stack.user, spec)


def empty_prompt(stack: Stack) -> Told:
    return both(stack.user, spec_of(""))


def prompt_too_long(stack: Stack) -> Told:
    return both(stack.user, spec_of("x" * CONTEXT))


def exceeds_page_pool(stack: Stack) -> Told:
    """Context fits the pool; what is pinned is nobody else's."""
    stack.root.SetPinnedPrefix(server_pb2.SetPinnedPrefixRequest(name="keep", text="k" * 40))
    try:
        return both(stack.user, spec_of("x" * 16, CONTEXT - 16))
    finally:
        stack.root.FlushPrefixCache(server_pb2.FlushPrefixCacheRequest(include_pinned=True))


def malformed(stack: Stack) -> Told:
    path = "/kvatlas.v1.GenerationService/Generate"
    one = told(lambda: raw(stack.channel, path, b"\xff\xff", stack.user.metadata))
    utf8 = told(lambda: raw(stack.channel, path, b"\x0a\x05\x0a\x03\xff\xfe\xfd", stack.user.metadata))
    assert one == utf8
    return one


def message_over_4_mib(stack: Stack) -> Told:
    return both(stack.user, spec_of("x" * 5_000_000))


def metadata_over_16_kib(stack: Stack) -> Told:
    metadata = (*stack.user.metadata, ("x-big", "m" * 20_000))
    return told(lambda: raw(stack.channel, "/kvatlas.v1.GenerationService/Generate", b"", metadata))


def unknown_rpc(stack: Stack) -> Told:
    return told(lambda: raw(stack.channel, "/kvatlas.v1.GenerationService/Nothing", b"", stack.user.metadata))


def unknown_model(stack: Stack) -> Told:
    return both(stack.user, spec_of(model="another"))


def unknown_sequence(stack: Stack) -> Told:
    """Another tenant's is as unknown as none."""
    call = stack.other.stream(slow(CONTEXT - 8, request_id="theirs"))
    next(call)
    try:
        return told(lambda: stack.user.GetSequence(cache_pb2.GetSequenceRequest(request_id="theirs")))
    finally:
        call.cancel()


def unknown_worker(stack: Stack) -> Told:
    return told(lambda: stack.user.GetPagePool(cache_pb2.GetPagePoolRequest(worker_id="worker-9")))


def unknown_page(stack: Stack) -> Told:
    return told(lambda: stack.user.GetPage(cache_pb2.GetPageRequest(page_id=PAGES + 1)))


def unknown_recording(stack: Stack) -> Told:
    return told(lambda: stack.root.GetRecording(server_pb2.GetRecordingRequest(recording_id="none")))


def unknown_profile(stack: Stack) -> Told:
    return told(lambda: stack.root.GetProfile(server_pb2.GetProfileRequest(file_name="none")))


def worker_not_named(stack: Stack) -> Told:
    second = ScriptedWorker(f"ipc://{stack._folder}/second", "worker-1").start()
    try:
        running, channel, admin = stack.service(workers=(stack.worker.address, second.address))
        wait_for(
            lambda: len([link for link in running.service.backstage.pool.links if link.is_up]) == 2, "both"
        )
        caller = Caller(channel, admin, TOKENS["user"])
        return told(lambda: caller.GetPagePool(cache_pb2.GetPagePoolRequest()))
    finally:
        second.stop()


def feature_off(stack: Stack) -> Told:
    return both(stack.user, spec_of(adapter="lora-1"))


def too_many_pinned_pages(stack: Stack) -> Told:
    text = "p" * 16 * (PAGES // 4 + 1)
    return told(lambda: stack.root.SetPinnedPrefix(server_pb2.SetPinnedPrefixRequest(name="big", text=text)))


def recorder_busy(stack: Stack) -> Told:
    started = stack.root.StartRecording(server_pb2.StartRecordingRequest())
    try:
        refusal = told(lambda: stack.root.StartRecording(server_pb2.StartRecordingRequest()))
        assert refusal.metadata["recording_id"] == started.recording.recording_id
        return refusal
    finally:
        stack.root.StopRecording(server_pb2.StopRecordingRequest())


def profile_running(stack: Stack) -> Told:
    """The first ends with the step that runs when it is called off."""
    with stack.busy():
        stub = server_pb2_grpc.AdminServiceStub(stack.admin)
        first: Future[Any] = stub.CaptureProfile.future(
            server_pb2.CaptureProfileRequest(steps=1000), timeout=SECONDS, metadata=stack.root.metadata
        )
        wait_for(lambda: _is_profiling(stack), "the profile")
        refusal = told(lambda: stack.root.CaptureProfile(server_pb2.CaptureProfileRequest(steps=1)))
        first.cancel()
    return refusal


def _is_profiling(stack: Stack) -> bool:
    return "event=profile_began" in stack.worker.log_path.read_text()


def duplicate_id(stack: Stack) -> Told:
    """The first call goes on; another tenant's call of that id too."""
    first = stack.user.stream(slow(8, request_id="twice"))
    assert next(first).WhichOneof("event") == "started"
    other = stack.other.stream(spec_of(request_id="twice"))
    refusal = both(stack.user, spec_of(request_id="twice"))
    for call in (first, other):
        assert list(call)[-1].WhichOneof("event") == "summary"
    return refusal


def queue_full(stack: Stack) -> Told:
    with stack.busy(QUEUE):
        refusal = both(stack.user, spec_of())
        assert 50 <= int(refusal.pushback or 0) <= 5000
        assert refusal.retry_ms == int(refusal.pushback or 0)
        return refusal


def queue_full_third_attempt(stack: Stack) -> Told:
    policy = {
        "maxAttempts": 5,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.01s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    names = [{"service": "kvatlas.v1.GenerationService"}]
    config = json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}]})
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
    _, channel, admin = stack.service(workers=(f"ipc://{stack._folder}/nobody",))
    return both(Caller(channel, admin, TOKENS["user"]), spec_of())


def breaks_a_step(stack: Stack) -> Told:
    """A neighbour goes on."""
    neighbour = stack.other.stream(slow(6))
    assert next(neighbour).WhichOneof("event") == "started"
    refusal = both(stack.user, spec_of(BREAKS_STEP))
    assert list(neighbour)[-1].WhichOneof("event") == "summary"
    return refusal


def no_credential(stack: Stack) -> Told:
    nobody = Caller(stack.channel, stack.admin, "")
    refusal = both(nobody, spec_of("x" * CONTEXT))  # before the content
    bad = told(
        lambda: raw(
            stack.channel, "/kvatlas.v1.GenerationService/Generate", b"", (("authorization", "Bearer x"),)
        )
    )
    assert bad == refusal
    return refusal


def scope_missing(stack: Stack) -> Told:
    user = told(lambda: stack.user.StartDrain(server_pb2.StartDrainRequest()))
    assert (user.status, user.metadata["scope"]) == ("PERMISSION_DENIED", "admin")
    looker = both(stack.caller("looker"), spec_of(""))  # before the content
    assert looker.metadata["scope"] == "generate"
    return both(stack.user, spec_of(scheduling=pb.SchedulingOptions(priority=1)))


def max_duration(stack: Stack) -> Told:
    spec = slow(CONTEXT - 8)
    spec.stop.max_duration.FromMilliseconds(700)
    response = stack.user.generate(spec)
    assert response.choices[0].finish_reason == pb.FINISH_REASON_TIME_LIMIT
    assert 1 <= response.usage.completion_tokens < CONTEXT - 8
    return Told("OK")


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


@dataclass(frozen=True)
class Row:
    """What the table says of a situation."""

    act: Callable[[Stack], Told]
    status: str
    reason: str = ""
    keys: tuple[str, ...] = ()  # of ErrorInfo's metadata
    paths: tuple[str, ...] = ()  # of BadRequest, at least these
    retry_ms: int | None = None  # of RetryInfo
    pushback: str | None = None
    quota: str = ""
    is_slow: bool = False


ROWS_OF_TABLE = (
    Row(invalid_field, "INVALID_ARGUMENT", "INVALID_FIELD", ("request_id",),
        ("spec.sampling.temperature", "spec.sampling.top_p", "spec.output.format")),
    Row(empty_prompt, "INVALID_ARGUMENT", "INVALID_FIELD", ("request_id",), ("spec.text",)),
    Row(prompt_too_long, "INVALID_ARGUMENT", "PROMPT_TOO_LONG",
        ("prompt_tokens", "max_prompt_tokens", "request_id"), ("spec.prompt",)),
    Row(exceeds_page_pool, "INVALID_ARGUMENT", "EXCEEDS_PAGE_POOL",
        ("needed_pages", "total_pages", "request_id")),
    Row(malformed, "INVALID_ARGUMENT", "MALFORMED_MESSAGE"),
    Row(message_over_4_mib, "RESOURCE_EXHAUSTED"),
    Row(metadata_over_16_kib, "RESOURCE_EXHAUSTED"),
    Row(unknown_rpc, "UNIMPLEMENTED"),
    Row(unknown_model, "NOT_FOUND", "MODEL_NOT_FOUND", ("request_id",)),
    Row(unknown_sequence, "NOT_FOUND", "SEQUENCE_NOT_FOUND"),
    Row(unknown_worker, "NOT_FOUND", "WORKER_NOT_FOUND"),
    Row(unknown_page, "NOT_FOUND", "WORKER_NOT_FOUND"),
    Row(unknown_recording, "NOT_FOUND", "RECORDING_NOT_FOUND"),
    Row(unknown_profile, "NOT_FOUND", "PROFILE_NOT_FOUND"),
    Row(worker_not_named, "FAILED_PRECONDITION", "WORKER_ID_REQUIRED", ("worker_ids",)),
    Row(feature_off, "FAILED_PRECONDITION", "FEATURE_DISABLED", ("feature", "request_id")),
    Row(too_many_pinned_pages, "FAILED_PRECONDITION", "PIN_LIMIT",
        ("needed_pages", "pinned_pages", "max_pinned_pages")),
    Row(recorder_busy, "FAILED_PRECONDITION", "RECORDING_RUNNING", ("recording_id",)),
    Row(profile_running, "FAILED_PRECONDITION", "PROFILE_RUNNING"),
    Row(duplicate_id, "ALREADY_EXISTS", "DUPLICATE_REQUEST_ID", ("request_id",)),
    Row(queue_full, "UNAVAILABLE", "QUEUE_FULL", ("request_id",)),
    Row(queue_full_third_attempt, "UNAVAILABLE", "QUEUE_FULL", ("request_id",), pushback="-1"),
    Row(quota_of_active, "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", ("limit", "value", "request_id"),
        retry_ms=1000, quota="principal:capped"),
    Row(quota_of_queued, "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED", ("limit", "value", "request_id"),
        retry_ms=1000, quota="principal:capped"),
    Row(queue_timeout, "RESOURCE_EXHAUSTED", "QUEUE_TIMEOUT", ("request_id",), retry_ms=1000),
    Row(too_many_watches, "RESOURCE_EXHAUSTED", "WATCH_LIMIT", retry_ms=1000),
    Row(deadline_too_short, "DEADLINE_EXCEEDED", "DEADLINE_TOO_SHORT",
        ("estimated_wait_ms", "request_id"), is_slow=True),
    Row(deadline_in_queue, "DEADLINE_EXCEEDED"),
    Row(deadline_while_running, "DEADLINE_EXCEEDED"),
    Row(no_deadline, "DEADLINE_EXCEEDED", "DEADLINE_PASSED", ("request_id",)),
    Row(client_cancels, "CANCELLED"),
    Row(draining, "UNAVAILABLE", "DRAINING", ("request_id",), retry_ms=100, pushback="100"),
    Row(drain_taken_back, "OK"),
    Row(grace_over, "UNAVAILABLE", "DRAINING", ("tokens_sent", "request_id"), retry_ms=100, pushback="100"),
    Row(not_ready, "UNAVAILABLE", "NOT_READY", ("request_id",), retry_ms=1000, pushback="1000"),
    Row(breaks_a_step, "INTERNAL", "INTERNAL", ("request_id",)),
    Row(no_credential, "UNAUTHENTICATED", "BAD_CREDENTIALS"),
    Row(scope_missing, "PERMISSION_DENIED", "MISSING_SCOPE", ("scope", "request_id")),
    Row(max_duration, "OK"),
    Row(cancel_generation, "OK"),
    Row(cancel_requests, "CANCELLED", "CANCELLED_BY_OPERATOR", ("request_id",)),
)  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.act.__name__, marks=[pytest.mark.slow] if row.is_slow else [])
        for row in ROWS_OF_TABLE
    ],
)
def test_a_situation_gets_its_status_and_leaves_nothing(stack: Stack, row: Row) -> None:
    got = row.act(stack)
    assert (got.status, got.reason) == (row.status, row.reason)
    assert set(row.keys) <= set(got.metadata), got.metadata
    assert set(row.paths) <= set(got.paths), got.paths
    assert got.quota == row.quota
    if row.retry_ms is not None:
        assert got.retry_ms == row.retry_ms
    if row.pushback is not None:
        assert got.pushback == row.pushback
    wait_for(stack.is_idle, "idle service and worker", [stack.worker])
    # The map follows a moment later; then no step may have been made after the last page came back.
    wait_for(lambda: stack.steps_since_release() <= 1, "pages that came back in time", [stack.worker])
