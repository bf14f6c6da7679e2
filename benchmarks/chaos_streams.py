"""The clients of a chaos run: streams that are opened again and again, read in several ways, and judged.

Owns what every stream gave and how it ended. An answer is right if it is that of the undisturbed run, token
by token; of one that was left, as far as it was read.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from time import monotonic

from benchmarks.chaos_plan import Reader, RequestPlan, StreamPlan, StreamSource
from kvatlas.client.aio import AsyncClient
from kvatlas.client.errors import KvatlasError, Unavailable
from kvatlas.client.events import Delta, Finished, Started, Summary
from kvatlas.client.request import Options
from kvatlas.client.token_stream import AsyncTokenStream

STREAM_SECONDS = 300.0  # deadline; one that needs it has hung
REOPEN_SECONDS = 0.2  # after nobody took a stream
MAX_NOTES = 20  # mistakes that are told in words


@dataclass(slots=True)
class Answer:
    """What a reader got of one request."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, list[str]] = field(default_factory=dict)
    logprob_counts: dict[int, int] = field(default_factory=dict)
    ends: dict[int, tuple[str, object, int]] = field(default_factory=dict)
    is_whole: bool = False
    server_resumes: int = 0

    def text(self, index: int) -> str:
        """Of one choice."""
        return "".join(self.texts.get(index, ()))

    def fault_against(self, right: "Answer") -> str:
        """Empty where it is the same as far as it goes; else where it is not."""
        for index, ids in self.token_ids.items():
            wanted = right.token_ids.get(index, [])
            if ids != wanted[: len(ids)]:
                pairs = enumerate(zip_longest(ids, wanted))
                place, pair = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
                return f"choice {index}: token {place} is {pair[0]}, undisturbed {pair[1]}"
            if not right.text(index).startswith(self.text(index)):
                return f"choice {index}: other text"
        if not self.is_whole:
            return ""
        if self.ends != right.ends or self.token_ids != right.token_ids:
            return f"ends {self.ends}, undisturbed {right.ends}"
        if any(self.text(index) != right.text(index) for index in right.ends):
            return "text is not whole"
        if self.logprob_counts != right.logprob_counts:
            return f"log-probabilities {self.logprob_counts}, undisturbed {right.logprob_counts}"
        return ""


@dataclass
class Tally:
    """All streams together."""

    opened: int = 0
    ended: Counter[str] = field(default_factory=Counter)  # whole, left, or the reason of a failure
    readers: Counter[str] = field(default_factory=Counter)
    refused_before_start: int = 0  # opened again: nothing had been promised
    mismatches: int = 0
    notes: list[str] = field(default_factory=list)
    tokens: int = 0
    server_resumes: int = 0  # sequences that went on at another worker, or at the same one restarted
    client_resumes: int = 0  # streams that went on at another service
    gaps: list[float] = field(default_factory=list)  # seconds between two messages of a steady reader
    resumed_gaps: list[float] = field(default_factory=list)  # the longest of each stream that was resumed

    def note(self, text: str) -> None:
        """The first mistakes are told in words."""
        if len(self.notes) < MAX_NOTES:
            self.notes.append(text)


class Crowd:
    """So many readers at once, each opening a stream when its last one ended, until `stop`."""

    def __init__(
        self,
        client: AsyncClient,
        plans: StreamSource,
        requests: Sequence[RequestPlan],
        right: Sequence[Answer],
        size: int,
    ) -> None:
        self.tally = Tally()
        self.open_streams = 0
        self._client = client
        self._plans = plans
        self._requests = requests
        self._right = right
        self._is_stopping = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read_on()) for _ in range(size)]

    async def stop(self) -> None:
        """No new streams; those that run are read to their end."""
        self._is_stopping.set()
        await asyncio.gather(*self._tasks)

    async def abandon(self) -> None:
        """Leaves all at once, after a failure."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _read_on(self) -> None:
        while not self._is_stopping.is_set():
            await self._read_one(self._plans.take())

    async def _read_one(self, plan: StreamPlan) -> None:
        tally, request = self.tally, self._requests[plan.request]
        while not self._is_stopping.is_set():
            stream = open_stream(self._client, request)
            reading = _Reading(plan, stream)
            self.open_streams += 1
            try:
                await reading.run()
                outcome = "whole" if reading.answer.is_whole else "left"
            except Unavailable as error:
                if not reading.has_started:
                    tally.refused_before_start += 1
                    await asyncio.sleep(error.retry_seconds or REOPEN_SECONDS)
                    continue
                outcome = error.reason or error.code
                tally.note(f"request {plan.request} ({plan.reader.value}): {error}")
            except KvatlasError as error:
                outcome = error.reason or error.code
                tally.note(f"request {plan.request} ({plan.reader.value}): {error}")
            finally:
                self.open_streams -= 1
                stream.close()
            self._count(plan, reading, outcome)
            return

    def _count(self, plan: StreamPlan, reading: "_Reading", outcome: str) -> None:
        tally, answer = self.tally, reading.answer
        tally.opened += 1
        tally.ended[outcome] += 1
        tally.readers[plan.reader.value] += 1
        tally.tokens += sum(len(ids) for ids in answer.token_ids.values())
        tally.server_resumes += answer.server_resumes
        tally.client_resumes += reading.stream.resumes
        if plan.reader is Reader.STEADY:
            tally.gaps += reading.gaps
            if (answer.server_resumes or reading.stream.resumes) and reading.gaps:
                tally.resumed_gaps.append(max(reading.gaps))
        if fault := answer.fault_against(self._right[plan.request]):
            tally.mismatches += 1
            tally.note(f"request {plan.request} ({plan.reader.value}, {outcome}): {fault}")


def open_stream(client: AsyncClient, request: RequestPlan) -> AsyncTokenStream:
    """One request of the plan."""
    options = Options(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        n=request.samples,
        frequency_penalty=request.penalty,
        output="both",
    )
    if request.stop:
        options["stop_strings"] = [request.stop]
    if request.regex:
        options["regex"] = request.regex
    if request.has_logprobs:
        options["logprobs"] = 2
    return client.stream(
        list(request.prompt),
        timeout_seconds=STREAM_SECONDS,
        min_tokens_per_message=request.min_tokens_per_message,
        **options,
    )


async def right_answer(client: AsyncClient, request: RequestPlan) -> Answer:
    """Of an undisturbed server. Raises KvatlasError."""
    async with open_stream(client, request) as stream:
        reading = _Reading(StreamPlan(0, Reader.STEADY, 0, 0.0), stream)
        await reading.run()
        return reading.answer


class _Reading:
    """One stream on its way to one reader."""

    def __init__(self, plan: StreamPlan, stream: AsyncTokenStream) -> None:
        self.answer = Answer()
        self.stream = stream
        self.gaps: list[float] = []
        self.has_started = False
        self._plan = plan
        self._num_tokens = 0
        self._has_stalled = False
        self._last = 0.0

    async def run(self) -> None:
        """Until its end, or until the reader leaves. Raises KvatlasError."""
        async for event in self.stream:
            if isinstance(event, Started):
                self.has_started = True
            elif isinstance(event, Delta):
                self._take(event)
                if not await self._wants_more():
                    return
            elif isinstance(event, Finished):
                self.answer.ends[event.index] = (event.reason, event.stop_match, event.completion_tokens)
            elif isinstance(event, Summary):
                self.answer.is_whole = True
                self.answer.server_resumes = event.usage.resumes

    def _take(self, delta: Delta) -> None:
        answer, now = self.answer, monotonic()
        if self._last:
            self.gaps.append(now - self._last)
        self._last = now
        answer.token_ids.setdefault(delta.index, []).extend(delta.token_ids)
        answer.texts.setdefault(delta.index, []).append(delta.text)
        if delta.logprobs:
            count = answer.logprob_counts.get(delta.index, 0)
            answer.logprob_counts[delta.index] = count + len(delta.logprobs)
        self._num_tokens += delta.token_count

    async def _wants_more(self) -> bool:
        plan = self._plan
        if plan.reader is Reader.SLOW:
            await asyncio.sleep(plan.seconds)
        elif plan.reader is Reader.STALLED and not self._has_stalled and self._num_tokens > plan.after_tokens:
            self._has_stalled = True
            await asyncio.sleep(plan.seconds)
        return plan.reader is not Reader.CANCELS or self._num_tokens <= plan.after_tokens
