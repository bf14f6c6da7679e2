"""What a worker says of itself: every field is told, each with the value that it is named for."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from google.protobuf.message import Message

from kvatlas.v1 import cache_pb2, server_pb2
from worker.description import ModelDescription, PoolDescription, WorkerDescription, WorkerState
from worker.link import integrity_codec, status_codec
from worker.messages import CheckAnswer, FlushAnswer, PinAnswer, PinnedPrefix, Ticket
from worker.readers.audit import AuditBook, Finding, SweepReport
from worker.readers.metric_table import CHECKS
from worker.stats import EngineCounts, LoadView, PoolTotals
from worker.status import StatusBoard, StepMark

SECOND = 1_000_000_000


def numbered(kind: type[Any], first: int) -> Any:
    """One of these, in whose fields of whole numbers stand first, first + 1, ..."""
    whole = [field.name for field in fields(kind) if field.type in (int, "int")]
    return kind(**{name: first + place for place, name in enumerate(whole)})


def unset(message: Message) -> set[str]:
    """Names of fields that say nothing."""
    told = {field.name for field, _ in message.ListFields()}
    return {field.name for field in message.DESCRIPTOR.fields} - told


def assert_like(message: Message, source: object, other_names: Mapping[str, str] | None = None) -> None:
    """Each field has the value of the field that is named like it, or that ``other_names`` gives."""
    names = other_names or {}
    for field, value in message.ListFields():
        name = names.get(field.name, field.name)
        if hasattr(source, name):
            expected = getattr(source, name)
            told = list(value) if isinstance(expected, tuple) else value
            assert told == (list(expected) if isinstance(expected, tuple) else expected), field.name


MODEL = ModelDescription("m", 97, 4096, (1, 2), "abc", True, "r1", "llama", "bf16", 135, 0.5, 0.25, 40, 1.5)
POOL = PoolDescription(60, 16, 8, 128, "lfu", 1024, 30, 3, 64, "fp8", "cuda:0", 2)
DESCRIPTION = WorkerDescription(
    "w",
    7 * SECOND,
    MODEL,
    POOL,
    max_queued=11,
    max_context=2048,
    max_pinned_pages=15,
    features=("prefix_cache",),
    pages_address="tcp://a:1",
    fingerprint_key=b"key",
    attention_backend="triton",
    attention_backend_reason="measured",
    device_name="a device",
    device_memory_bytes=1 << 40,
    compute_capability="sm_90",
    versions={"torch": "2"},
)
TOTALS: PoolTotals = numbered(PoolTotals, 1000)
COUNTS: EngineCounts = replace(numbered(EngineCounts, 2000), estimated_wait_seconds=0.5)
REVISION = cache_pb2.Revision(epoch=7 * SECOND, number=TOTALS.revision, step=TOTALS.step)


def board() -> StatusBoard:
    load = LoadView(COUNTS, TOTALS, 1.5, 2.5, 0.25, 0.125)
    return StatusBoard(DESCRIPTION, WorkerState.SERVING, StepMark(77, 10.0), load)


def test_a_welcome_says_who_the_worker_is() -> None:
    config = status_codec.config(board())
    assert unset(config) == set()
    assert unset(config.worker) == {"last_heartbeat_time"}  # the service says when it heard of it
    assert_like(config.worker, DESCRIPTION)
    assert (config.worker.state, config.worker.model_id) == (server_pb2.SERVER_STATE_SERVING, "m")
    assert unset(config.model) == set()
    assert_like(config.model, MODEL)
    defaults = config.model.defaults
    assert unset(defaults) == {"min_p", "frequency_penalty", "presence_penalty"}  # no model's files have them
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.repetition_penalty) == (
        0.5,
        0.25,
        40,
        1.5,
    )
    limits = (config.max_running_sequences, config.max_queued_requests, config.max_context_tokens)
    assert limits == (8, 11, 2048)
    assert (config.max_pinned_pages, config.pages_address, config.fingerprint_key) == (
        15,
        "tcp://a:1",
        b"key",
    )


def test_the_geometry_counts_the_dummy_page_and_row() -> None:
    geometry = status_codec.geometry(DESCRIPTION)
    assert unset(geometry) == set()
    assert_like(geometry, POOL)
    assert (geometry.page_count, geometry.dummy_page_id, geometry.row_count) == (61, 60, 9)
    assert (geometry.worker_id, geometry.epoch, geometry.start_time.seconds) == ("w", 7 * SECOND, 7)


def test_a_heartbeat_has_the_load_and_the_pool_of_one_moment() -> None:
    beat = status_codec.heartbeat(board(), now=12.0)
    assert unset(beat) == unset(beat.load) == set()
    assert_like(beat.load, COUNTS)
    assert (beat.load.available_pages, beat.load.total_pages) == (TOTALS.available_pages, TOTALS.total_pages)
    rates = (
        beat.load.output_tokens_per_second,
        beat.load.prompt_tokens_per_second,
        beat.load.prefix_hit_rate,
    )
    assert rates == (1.5, 2.5, 0.25)
    assert beat.load.mean_step_time.ToMilliseconds() == 125
    assert beat.load.last_step_age.ToMilliseconds() == 2000
    assert (beat.step, beat.revision, beat.estimated_wait_ms) == (77, REVISION, 500)
    assert unset(beat.pool) == set()
    assert_like(beat.pool, TOTALS, {"wasted_slots": "unfilled_slots"})
    assert_like(beat.pool, COUNTS)


def test_pins_are_told_with_their_tenant_and_salt_apart() -> None:
    pin = PinnedPrefix("p", b"tenant\0salt\0x", 9, 8, 2, 5, 4, 1.5)
    reply = status_codec.pin_reply(PinAnswer(Ticket("s", 3), (pin,)), "w", 2 * SECOND)
    assert (reply.command_id, unset(reply.pin)) == (3, set())
    assert (reply.pin.tenant, reply.pin.salt, reply.pin.worker_id) == ("tenant", "salt\0x", "w")
    assert reply.pin.expire_time.ToMilliseconds() == 3500
    assert (reply.pin.name, reply.pin.token_count, reply.pin.pinned_tokens) == ("p", 9, 8)
    assert (reply.pin.pinned_pages, reply.pin.computed_tokens, reply.pin.hit_tokens) == (2, 5, 4)
    for_ever = PinnedPrefix("q", b"\0", 9, 8, 2, 5, 4, None)
    reply = status_codec.pin_reply(PinAnswer(Ticket("s", 3), (pin, for_ever), is_list=True), "w", 0)
    assert [each.name for each in reply.pins.pins] == ["p", "q"]
    assert not reply.pins.pins[1].HasField("expire_time")
    assert not status_codec.pin_reply(PinAnswer(Ticket("s", 3), ()), "w", 0).HasField("pin")


def test_a_flush_says_what_was_freed_and_what_stays_in_use() -> None:
    reply = status_codec.flush_reply(FlushAnswer(Ticket("s", 3), 4, 5))
    assert (reply.command_id, reply.flush.freed_pages, reply.flush.unindexed_pages) == (3, 4, 5)


def finding(check: str, time_ns: int) -> Finding:
    return Finding(check, "subject", "expected", "found", page=5, row=6, revision=(8, 9), time_ns=time_ns)


def test_every_check_has_its_number_in_the_api() -> None:
    names = [name.removeprefix("INTEGRITY_CHECK_").lower() for name in cache_pb2.IntegrityCheck.keys()[1:]]
    assert names == list(CHECKS)


def test_results_of_the_audit_are_told_with_the_newest_finding_first() -> None:
    book = AuditBook()
    book.findings.extend([finding(CHECKS[0], SECOND), finding(CHECKS[1], 2 * SECOND)])
    book.num_findings, book.num_sweeps, book.last_success_ns, book.last_seconds = 12, 3, 4 * SECOND, 0.5
    result = book.results[CHECKS[1]]
    result.passes, result.fails, result.last_run_ns, result.last_pass_ns = 5, 6, 7 * SECOND, 8 * SECOND
    reply = integrity_codec.integrity_reply(3, book, epoch=7 * SECOND, pool=TOTALS)
    told = reply.integrity
    assert (reply.command_id, unset(told)) == (3, set())
    assert (told.violations_total, told.sweep_count, told.revision) == (12, 3, REVISION)
    assert (told.last_success_time.seconds, told.last_round_time.ToMilliseconds()) == (4, 500)
    assert [violation.find_time.seconds for violation in told.violations] == [2, 1]
    newest = told.violations[0]
    assert (unset(newest), newest.check) == (set(), 2)
    assert (newest.subject, newest.expected, newest.found) == ("subject", "expected", "found")
    assert (newest.page_id, newest.row) == (5, 6)
    assert newest.revision == cache_pb2.Revision(epoch=7 * SECOND, number=8, step=9)
    assert [each.check for each in told.checks] == list(range(1, len(CHECKS) + 1))
    stats = told.checks[1]
    assert (stats.pass_count, stats.fail_count) == (5, 6)
    assert (stats.last_run_time.seconds, stats.last_pass_time.seconds) == (7, 8)
    assert unset(told.checks[0]) == {"pass_count", "fail_count", "last_run_time", "last_pass_time"}


def test_the_report_of_a_check_of_everything_is_whole() -> None:
    report = SweepReport([finding(CHECKS[0], SECOND)], 12, 60, 8, 5, 0.25, (3, 4), (5, 6))
    reply = integrity_codec.check_reply(CheckAnswer(Ticket("s", 3), report), 7)
    told = reply.check_integrity
    assert (reply.command_id, unset(told), len(told.violations)) == (3, set(), 1)
    assert (told.violations_total, told.checked_pages, told.checked_rows, told.round_count) == (12, 60, 8, 5)
    assert told.engine_time.ToMilliseconds() == 250
    assert told.first_revision == cache_pb2.Revision(epoch=7, number=3, step=4)
    assert told.last_revision == cache_pb2.Revision(epoch=7, number=5, step=6)
