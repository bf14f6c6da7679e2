"""Messages of kvatlas.v1 → the frozen values of facts.py. Pure functions, one for each kind of answer."""

from itertools import pairwise
from typing import Any

from dashboard.facts import (
    CheckFacts,
    CheckRun,
    Estimate,
    EstimateReport,
    IntegrityFacts,
    PageEventFacts,
    PageFacts,
    PageHolder,
    ServerFacts,
    TableRow,
    TokenizedPrompt,
    ViolationFacts,
    WorkerFacts,
    WorkerLoad,
)
from kvatlas.v1 import cache_pb2 as pb
from kvatlas.v1 import generation_pb2, server_pb2


def name_of(enum: Any, number: int, prefix: str) -> str:
    """`active` for PAGE_STATE_ACTIVE; a number this version does not know stays a number."""
    try:
        return str(enum.Name(number)).removeprefix(prefix).lower()
    except ValueError:
        return f"unknown_{number}"


def server(answer: server_pb2.GetServerInfoResponse) -> ServerFacts:
    """GetServerInfo."""
    return ServerFacts(
        version=answer.version,
        instance_id=answer.instance_id,
        state=name_of(server_pb2.ServerState, answer.state, "SERVER_STATE_"),
        features=frozenset(answer.features),
        workers=tuple(
            WorkerFacts(
                worker_id=each.worker_id,
                epoch=each.epoch,
                state=name_of(server_pb2.ServerState, each.state, "SERVER_STATE_"),
                model_id=each.model_id,
                device_name=each.device_name,
                attention_backend=each.attention_backend,
            )
            for each in answer.workers
        ),
    )


def worker_load(load: server_pb2.WorkerLoad) -> WorkerLoad:
    """One worker of GetLoad."""
    return WorkerLoad(**{name: getattr(load, name) for name in WorkerLoad.__slots__})


def page(page_id: int, answer: pb.GetPageResponse) -> PageFacts:
    """GetPage."""
    return PageFacts(
        page_id=page_id,
        state=name_of(pb.PageState, answer.state, "PAGE_STATE_"),
        is_sealed=answer.sealed,
        is_pinned=answer.pinned,
        ref_count=answer.ref_count,
        filled_slots=answer.filled_slots,
        holders=tuple(
            PageHolder(
                each.owner,
                each.request_id,
                each.choice_index,
                name_of(pb.SequenceState, each.state, "SEQUENCE_STATE_"),
                each.token_count,
            )
            for each in answer.sequences
        ),
        parent_page_id=answer.parent_page_id if answer.HasField("parent_page_id") else None,
        child_page_ids=tuple(answer.child_page_ids),
        hit_count=answer.hit_count,
        age_seconds=answer.age.ToNanoseconds() / 1e9,
        idle_seconds=answer.idle.ToNanoseconds() / 1e9,
        events=tuple(page_event(each) for each in answer.events),
    )


def page_event(event: pb.PageEvent) -> PageEventFacts:
    """One event of a page."""
    return PageEventFacts(
        number=event.number,
        kind=name_of(pb.PageEventType, event.type, "PAGE_EVENT_TYPE_"),
        step=event.step,
        time_ms=event.time.ToMilliseconds(),
        owner=event.owner,
        request_id=event.request_id,
        ref_count=event.ref_count,
        other_page_id=event.other_page_id if event.HasField("other_page_id") else None,
    )


def table_row(row: pb.GetPageTableResponse) -> TableRow:
    """One row of the page table."""
    slots = memoryview(row.slots).cast("i").tolist()
    return TableRow(row.row, row.owner, row.request_id, row.token_count, tuple(slots))


def estimate_report(answer: pb.EstimateCacheResponse) -> EstimateReport:
    """EstimateCache."""
    return EstimateReport(
        estimates=tuple(estimate(each) for each in answer.estimates),
        observed=estimate(answer.observed),
        sampling_rate=answer.sample.sampling_rate,
        request_count=answer.sample.request_count,
        token_count=answer.sample.token_count,
        seconds=answer.sample.duration.ToNanoseconds() / 1e9,
        token_granularity=answer.sample.token_granularity,
    )


def estimate(one: pb.CacheEstimate) -> Estimate:
    """One setting."""
    return Estimate(
        pool_slots=one.pool_slots,
        page_size=one.page_size,
        policy=one.eviction_policy,
        tokens={
            "hit": one.prefix.hit_tokens,
            "miss_cold": one.prefix.miss_cold_tokens,
            "miss_evicted": one.prefix.miss_evicted_tokens,
            "unaligned": one.prefix.unaligned_tokens,
        },
        hit_ratio=one.hit_ratio,
        hit_ratio_error=one.hit_ratio_error,
        evictions=one.evictions if one.HasField("evictions") else None,
        mean_wasted_slots=one.mean_wasted_slots if one.HasField("mean_wasted_slots") else None,
        preemptions=one.preemptions,
    )


def integrity(answer: pb.GetIntegrityResponse) -> IntegrityFacts:
    """GetIntegrity."""
    return IntegrityFacts(
        checks=tuple(
            CheckFacts(
                name=_check_name(each.check),
                pass_count=each.pass_count,
                fail_count=each.fail_count,
                last_run_ms=_moment(each, "last_run_time"),
                last_pass_ms=_moment(each, "last_pass_time"),
            )
            for each in answer.checks
        ),
        violations=tuple(violation(each) for each in answer.violations),
        violations_total=answer.violations_total,
        last_success_ms=_moment(answer, "last_success_time"),
        last_round_seconds=answer.last_round_time.ToNanoseconds() / 1e9,
        sweep_count=answer.sweep_count,
    )


def check_run(answer: pb.RunIntegrityCheckResponse) -> CheckRun:
    """RunIntegrityCheck."""
    return CheckRun(
        violations=tuple(violation(each) for each in answer.violations),
        violations_total=answer.violations_total,
        checked_pages=answer.checked_pages,
        checked_rows=answer.checked_rows,
        engine_seconds=answer.engine_time.ToNanoseconds() / 1e9,
    )


def violation(found: pb.IntegrityViolation) -> ViolationFacts:
    """One finding."""
    return ViolationFacts(
        check=_check_name(found.check),
        subject=found.subject,
        expected=found.expected,
        found=found.found,
        page_id=found.page_id if found.HasField("page_id") else None,
        row=found.row if found.HasField("row") else None,
        time_ms=_moment(found, "find_time"),
    )


def tokenized(answer: generation_pb2.TokenizeResponse) -> TokenizedPrompt:
    """Tokenize with offsets, the text cut at them. A character may span tokens: it goes to the first."""
    raw = answer.rendered_text.encode()
    starts = [*answer.start_offsets, len(raw)]
    pieces = [raw[a:b].decode(errors="replace") for a, b in pairwise(starts)]
    return TokenizedPrompt(answer.rendered_text, tuple(pieces), answer.cached_tokens, answer.page_count)


def _check_name(check: int) -> str:
    return name_of(pb.IntegrityCheck, check, "INTEGRITY_CHECK_")


def _moment(message: Any, field: str) -> int | None:
    return int(getattr(message, field).ToMilliseconds()) if message.HasField(field) else None
