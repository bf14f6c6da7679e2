"""Logged requests → a trace that can be run again. The same for a recording and for the live sample."""

from array import array
from collections.abc import Sequence

from worker.readers.samples import LoggedEnd, LoggedRequest
from worker.scheduling.output import FinishCode
from worker.trace.workload import Output, TraceRequest

NO_KEYS: "array[int]" = array("Q")


def trace_requests(
    requests: Sequence[LoggedRequest], start_us: int, max_context_tokens: int
) -> list[TraceRequest]:
    """By arrival, in seconds since ``start_us``; what came before it comes at once."""
    found = [_request(request, start_us, max_context_tokens) for request in requests]
    return sorted(found, key=lambda request: request.arrival)


def _request(request: LoggedRequest, start_us: int, max_context_tokens: int) -> TraceRequest:
    ends = {end.sequence_id - request.sequence_id: end for end in request.ends}
    # A client may give a limit of two thousand million tokens, and each one of an output is laid out.
    limit = max(1, min(request.max_tokens, max_context_tokens - request.num_prompt))
    outputs = [_output(ends.get(sample), limit, start_us) for sample in range(request.sample_count)]
    return TraceRequest(
        arrival=max(0, request.time_us - start_us) / 1e6,
        num_prompt=request.num_prompt,
        max_tokens=request.max_tokens,
        keys=request.keys,
        outputs=outputs,
        priority=request.priority,
        cache_read=request.cache_read,
        cache_write=request.cache_write,
        is_counted=_is_counted(request, start_us),
    )


def _is_counted(request: LoggedRequest, start_us: int) -> bool:
    """Whether it was looked up within the trace."""
    waits = [end.queue_us for end in request.ends if end.queue_us or end.prefix is not None]
    return request.time_us + (waits[0] if waits else 0) >= start_us


def _output(end: LoggedEnd | None, limit: int, start_us: int) -> Output:
    """A sample; one that had not ended goes on to its limit, and the trace ends before it does."""
    if end is None or end.finish_code == FinishCode.DRAINED:
        return Output(limit, NO_KEYS if end is None else end.keys, is_cut=True)
    return Output(end.num_output, end.keys, max(0, end.time_us - start_us) / 1e6)
