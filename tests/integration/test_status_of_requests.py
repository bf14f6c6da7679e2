"""Rows of docs/errors.md for what a request or its caller is, and for what it asks for that is not there."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest

from kvatlas.v1 import cache_pb2, server_pb2, server_pb2_grpc
from kvatlas.v1 import generation_pb2 as pb
from service.testing_callers import SECONDS, Caller, Told, both, raw, told
from service.testing_fleet import FAULTY_TOKENS, wait_for
from service.testing_worker import ScriptedWorker
from tests.status_stack import CONTEXT, PAGES, TOKENS, Row, Stack, cases_of, check_row, slow, spec_of


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with ExitStack() as cleanup:
        yield Stack(tmp_path_factory.mktemp("rows"), cleanup)


BREAKS_STEP = chr(FAULTY_TOKENS["breaks_step"]) * 8


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
    second = ScriptedWorker(f"ipc://{stack.folder}/second", "worker-1").start()
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
    Row(breaks_a_step, "INTERNAL", "INTERNAL", ("request_id",)),
    Row(no_credential, "UNAUTHENTICATED", "BAD_CREDENTIALS"),
    Row(scope_missing, "PERMISSION_DENIED", "MISSING_SCOPE", ("scope", "request_id")),
)  # fmt: skip


@pytest.mark.parametrize("row", cases_of(ROWS_OF_TABLE))
def test_a_situation_gets_its_status_and_leaves_nothing(stack: Stack, row: Row) -> None:
    check_row(stack, row)
