"""EstimateCache at the worker: a sample of the last requests, the estimator, and figures as messages."""

import logging
from collections.abc import Callable
from typing import Any, NoReturn

from google.protobuf import duration_pb2

from kvatlas.v1 import cache_pb2
from kvatlas.worker.v1 import worker_pb2
from worker.channels import OutputQueue
from worker.description import WorkerDescription
from worker.link.commands import CallRefused
from worker.messages import CallError, CallFailure, CallReason, EncodedReply, LinkMessage, Ticket
from worker.pages.eviction import POLICIES
from worker.readers.recorder import Recorder
from worker.trace.counts import Setting
from worker.trace.estimate import EstimateTask
from worker.trace.estimator import Answer, Estimate, EstimateBroken, EstimateLate, Estimator
from worker.trace.loading import limits_of
from worker.trace.what_if import MAX_PAGES, MAX_SETTINGS

FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
MAX_PAGE_SIZE = 4096
MAX_ESTIMATED = 16_384  # requests times settings: a few seconds of one core
MIN_REQUESTS, MAX_REQUESTS = 512, 4_096
logger = logging.getLogger("worker.link")

_PREFIX_FIELDS = ("hit_tokens", "miss_cold_tokens", "miss_evicted_tokens", "unaligned_tokens")


class EstimateDesk:
    """Turns calls into tasks of the estimator, and its answers into replies."""

    def __init__(
        self,
        estimator: Estimator,
        answers: OutputQueue[LinkMessage],
        description: WorkerDescription,
        limits: cache_pb2.SchedulerLimits,
        clock: Callable[[], float],
    ) -> None:
        self._estimator = estimator
        self._answers = answers
        self._description = description
        self._limits = limits
        self._clock = clock

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for the answer any more."""
        self._estimator.cancel(ticket)

    def ask(
        self, recorder: Recorder, ticket: Ticket, asked: cache_pb2.EstimateCacheRequest, seconds: float
    ) -> None:
        """On the recorder's thread: takes a sample and hands it on. Raises CallRefused."""
        deadline = self._clock() + seconds
        pool, log = self._description.pool, recorder.log
        settings = _settings(asked, pool.num_pages * pool.page_size, pool.page_size, pool.eviction_policy)
        if bad := [each.page_size for each in settings if each.page_size % log.granularity]:
            _refuse(f"page_sizes: {bad[0]} is no multiple of {log.granularity} tokens")
        sample = log.sample(recorder.now_us())
        most = max(MIN_REQUESTS, min(MAX_REQUESTS, MAX_ESTIMATED // len(settings)))
        requests = sample.requests[-most:]
        task = EstimateTask(
            settings=settings,
            limits=limits_of(self._limits, pool.num_pages),
            page_size=pool.page_size,
            num_pages=pool.num_pages,
            policy=pool.eviction_policy,
            granularity=log.granularity,
            end_us=sample.time_us,
            window_us=asked.window.ToMicroseconds() if asked.HasField("window") else 0,
            is_whole=sample.is_whole and len(requests) == len(sample.requests),
            steps=sample.steps[-MAX_REQUESTS:],
            looks=sample.looks,
            num_requests=len(requests),
        )

        def on_answer(answer: Answer) -> None:
            self._answer(ticket, answer, task)

        if not self._estimator.submit(Estimate(ticket, task, requests, deadline, on_answer)):
            text = "too many estimates wait"
            raise CallRefused(CallError.RESOURCE_EXHAUSTED, CallReason.QUOTA_EXCEEDED, text)

    def _answer(self, ticket: Ticket, answer: Answer, task: EstimateTask) -> None:
        """On the estimator's thread."""
        try:
            self._tell(ticket, answer, task)
        except Exception:  # figures that make no message: the call is answered all the same
            logger.exception("event=estimate_failed")
            self._fail(ticket, CallError.INTERNAL, CallReason.INTERNAL, "the estimate failed")

    def _tell(self, ticket: Ticket, answer: Answer, task: EstimateTask) -> None:
        if isinstance(answer, EstimateLate):
            text = "the estimate was not ready in time: ask for fewer settings"
            self._fail(ticket, CallError.DEADLINE_EXCEEDED, CallReason.DEADLINE_PASSED, text)
        elif isinstance(answer, EstimateBroken):
            self._fail(ticket, CallError.INTERNAL, CallReason.INTERNAL, "the estimate failed")
        else:
            response = _response(answer, task, self._description.epoch)
            self._reply(ticket, worker_pb2.CommandReply(estimate=response))

    def _reply(self, ticket: Ticket, reply: worker_pb2.CommandReply) -> None:
        reply.command_id = ticket.command_id
        self._answers.put(EncodedReply(ticket, reply.SerializeToString(), is_last=True))

    def _fail(self, ticket: Ticket, error: CallError, reason: CallReason, message: str) -> None:
        self._answers.put(CallFailure(ticket, error, reason, message))


def _refuse(text: str) -> NoReturn:
    raise CallRefused(CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD, text)


def _settings(
    asked: cache_pb2.EstimateCacheRequest, pool_slots: int, page_size: int, policy: str
) -> list[Setting]:
    """Every combination. Raises CallRefused."""
    slots = list(asked.pool_slots) or [round(factor * pool_slots) for factor in FACTORS]
    sizes, policies = list(asked.page_sizes) or [page_size], list(asked.eviction_policies) or [policy]
    if len(slots) * len(sizes) * len(policies) > MAX_SETTINGS:
        count = len(slots) * len(sizes) * len(policies)
        _refuse(f"pool_slots, page_sizes, eviction_policies: {count} combinations, at most {MAX_SETTINGS}")
    if bad := [size for size in sizes if not 1 <= size <= MAX_PAGE_SIZE]:
        _refuse(f"page_sizes: {bad[0]} is not in [1, {MAX_PAGE_SIZE}]")
    if unknown := [name for name in policies if name not in POLICIES]:
        _refuse(f"eviction_policies: {unknown[0][:64]!r} is none of {', '.join(POLICIES)}")
    if wrong := [count for count in slots for size in sizes if not 1 <= count // size <= MAX_PAGES]:
        _refuse(f"pool_slots: {wrong[0]} slots are no pool of pages of {sizes} tokens")
    return [Setting(count // size, size, name) for name in policies for size in sizes for count in slots]


def _response(answer: dict[str, Any], task: EstimateTask, epoch_ns: int) -> cache_pb2.EstimateCacheResponse:
    today = Setting(task.num_pages, task.page_size, task.policy)
    observed = answer["observed"]
    looked_up = sum(observed[name] for name in _PREFIX_FIELDS)
    response = cache_pb2.EstimateCacheResponse(
        estimates=[_message(figures) for figures in answer["estimates"]],
        observed=cache_pb2.CacheEstimate(
            pool_slots=today.num_slots,
            page_size=today.page_size,
            eviction_policy=today.policy,
            prefix=cache_pb2.PrefixLookupTotals(**{name: observed[name] for name in _PREFIX_FIELDS}),
            hit_ratio=observed["hit_tokens"] / looked_up if looked_up else 0.0,
            evictions=observed["evictions"],  # None stays unset
            mean_wasted_slots=observed["mean_wasted_slots"],
            preemptions=observed["preemptions"],
            mean_queue_time=_duration(observed["mean_queue_seconds"]),
        ),
        sample=cache_pb2.EstimateSample(
            sampling_rate=1.0,
            request_count=answer["request_count"],
            token_count=answer["token_count"],
            duration=_duration(answer["duration_us"] / 1e6),
            token_granularity=task.granularity,
        ),
    )
    response.sample.start_time.FromNanoseconds(epoch_ns + answer["start_us"] * 1000)
    return response


def _message(figures: dict[str, Any]) -> cache_pb2.CacheEstimate:
    return cache_pb2.CacheEstimate(
        pool_slots=figures["num_pages"] * figures["page_size"],
        page_size=figures["page_size"],
        eviction_policy=figures["policy"],
        prefix=cache_pb2.PrefixLookupTotals(**{name: figures[name] for name in _PREFIX_FIELDS}),
        hit_ratio=figures["hit_ratio"],
        hit_ratio_error=figures["hit_ratio_error"],
        evictions=figures["evictions"],
        mean_wasted_slots=figures["mean_wasted_slots"],
        preemptions=figures["preemptions"],
        mean_queue_time=_duration(figures["mean_queue_seconds"]),
    )


def _duration(seconds: float) -> duration_pb2.Duration:
    found = duration_pb2.Duration()
    found.FromMicroseconds(round(seconds * 1e6))
    return found
