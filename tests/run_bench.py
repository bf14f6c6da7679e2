"""One request before workers that do what a test says: no socket, no stream, a clock of the test's own."""

import asyncio
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from service.fleet.live_runs import LiveRuns
from service.fleet.room import with_room
from service.handlers.account import RequestAccount
from service.handlers.choice import Choice
from service.handlers.run import GenerationRun
from service.mailbox import Inbox, Mailbox
from service.metrics import ServiceMetrics
from service.request import (
    AbortReason,
    AddOutcome,
    AddStatus,
    LostReason,
    Output,
    Request,
    Run,
    Sampling,
    SequenceEnd,
    SequenceStart,
    Stops,
)
from service.text.answer import AnswerText
from service.text.stop_strings import StopMatcher, StopStrings
from service.text.tokenizer import Tokenizer

PROMPT = tuple(range(10))


@dataclass(eq=False)
class FakeLink:
    """A worker that does what the test says."""

    address: str
    context: int = 600
    beat: Any = None
    sent: list[Run] = field(default_factory=list)
    aborted: list[tuple[list[int], AbortReason]] = field(default_factory=list)
    takes_runs: bool = True

    def __post_init__(self) -> None:
        self.worker_id = self.address
        self.runs = LiveRuns()
        self.facts = SimpleNamespace(
            model_id="m", max_context_tokens=self.context, max_running_sequences=8, page_size=4, epoch=1
        )

    def carries(self, sequence_id: int) -> bool:
        return sequence_id in self.runs

    def add(self, request: Request, run: Run, receiver: Any, boxes: Any) -> bool:
        if self.takes_runs:
            self.sent.append(run)
            self.runs.add(run, receiver, boxes)
        return self.takes_runs

    def abort(self, sequence_ids: list[int], reason: AbortReason, *, forget: bool = True) -> None:
        live = [each for each in sequence_ids if each in self.runs]
        if live:
            self.aborted.append((live, reason))
        if forget:
            for each in live:
                self.runs.forget(each)

    def answer(self, status: AddStatus) -> None:
        self.runs.take_outcome(AddOutcome(self.sent[-1].sequence_id, status))

    def step(self, *tokens: tuple[int, int], starts: Collection[int] = (), ends: Any = ()) -> None:
        self.runs.fan_out(
            SimpleNamespace(
                starts=[SequenceStart(each, None, 1, 0, resumed=False) for each in starts],
                prompt_scores=(),
                scores=None,
                sequence_ids=[each for each, _ in tokens],
                token_ids=[token for _, token in tokens],
                ends=[SequenceEnd(each, code) for each, code in ends],
            )  # type: ignore[arg-type]
        )


class FakePool:
    """Takes the first worker with room that is not avoided, or the first."""

    def __init__(self, *links: FakeLink) -> None:
        self.usable = list(links)
        self.watchers: list[Callable[[], None]] = []
        self._next = 1

    def pick(self, request: Request, avoid: Collection[str] = ()) -> Any:
        roomy: list[Any] = with_room(self.usable, request)  # type: ignore[arg-type]
        return next((one for one in roomy if one.address not in avoid), roomy[0] if roomy else None)

    def take_sequence_ids(self, count: int) -> int:
        self._next += count
        return self._next - count

    def watch(self, wake: Callable[[], None]) -> None:
        self.watchers.append(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        self.watchers = [each for each in self.watchers if each != wake]


class Bench:
    """One request before a pool; its clock is the loop's, which a test may turn on."""

    def __init__(
        self, loop: Any, *links: FakeLink, samples: int = 1, resume_seconds: float = 60.0, **more: Any
    ) -> None:
        self.pool = FakePool(*links)
        self.inbox = Inbox(loop)
        greedy = Sampling(0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, seed=1)
        plain = Request("r", PROMPT, greedy, Stops(100), Output(), context_tokens=600, num_samples=samples)
        self.request = replace(plain, **more)
        boxes = [Mailbox(self.inbox, 100, loop) for _ in range(samples)]
        stops = self.request.stops
        self.choices = [Choice(index, box, _answer(stops), stops) for index, box in enumerate(boxes)]
        self.metrics = ServiceMetrics(CollectorRegistry(), version="0", commit="")
        self.run = GenerationRun(
            self.request,
            self.choices,
            self.inbox,
            pool=self.pool,  # type: ignore[arg-type]
            metrics=self.metrics,
            account=RequestAccount(self.metrics, received=0.0),
            resume_seconds=resume_seconds,
            attempts_before=0,
        )


def _answer(stops: Stops) -> AnswerText | None:
    if not stops.strings:
        return None
    return AnswerText(Tokenizer.toy().detokenizer(), StopMatcher(StopStrings(stops.strings)))


class Loop(asyncio.SelectorEventLoop):
    """Whose clock goes on when a test says so."""

    now = 100.0

    def time(self) -> float:
        return self.now

    def turn(self) -> None:
        """What is due now is done."""
        asyncio._set_running_loop(None)
        self.call_soon(self.stop)
        self.run_forever()
        asyncio._set_running_loop(self)


def running_loop() -> Iterator[Loop]:
    """One that code asks for, and that does nothing but `turn`."""
    made = Loop()
    asyncio._set_running_loop(made)
    yield made
    asyncio._set_running_loop(None)
    made.close()


def lose(link: FakeLink, reason: LostReason = LostReason.CRASH) -> None:
    link.runs.lose(reason)


def begin(bench: Bench, link: FakeLink) -> None:
    """The request runs there, and has one token."""
    bench.run.submit()
    first = link.sent[-1].sequence_id
    link.answer(AddStatus.ACCEPTED)
    link.step((first, 65), starts=[first])
    bench.run.take()
