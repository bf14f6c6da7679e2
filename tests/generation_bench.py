"""The handlers of GenerationService before a fake worker, without a socket."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import server_pb2
from service.admission import Admission, Quota
from service.handlers.backstage import Backstage
from service.handlers.generation import GenerationServicer
from service.handlers.live import LiveCalls
from service.handlers.prompts import Prompts
from service.handlers.spans import Ending
from service.health import HealthBoard
from service.metrics import ServiceMetrics
from service.request import AddStatus, Call, FinishCode, current_call
from service.text.threads import TextThreads
from service.text.tokenizer import Tokenizer
from tests.run_bench import FakeLink, FakePool


class Pool(FakePool):
    """With what is known of its workers."""

    pin_pages = 0

    @property
    def facts(self) -> Any:
        return self.usable[0].facts


@dataclass
class Context:
    """A call's context: keeps what is written; a reader that does not read is behind a gate."""

    written: list[Any] = field(default_factory=list)
    heads: list[Any] = field(default_factory=list)
    gate: asyncio.Event | None = None
    fails: bool = False

    async def write(self, message: Any) -> None:
        if self.fails:
            raise ZeroDivisionError
        if self.gate is not None:
            await self.gate.wait()
        self.written.append(message)

    async def send_initial_metadata(self, metadata: Any) -> None:
        assert not self.written, "the head comes first"
        self.heads.append(dict(metadata))

    def events(self) -> list[str]:
        return [message.WhichOneof("event") for message in self.written]


class Traces:
    """Of all calls; each is told its end."""

    def __init__(self) -> None:
        self.ended: list[Ending] = []

    def begin(self, call: Call) -> "Traces":
        return self

    def end(self, ending: Ending) -> None:
        self.ended.append(ending)


class Desk:
    """A servicer and one worker that does what a test says."""

    def __init__(self, *, slow_reader_seconds: float = 600.0, max_calls: int = 4) -> None:
        self.link = FakeLink("w", context=100_000)
        self.link.facts = SimpleNamespace(
            **vars(self.link.facts),
            vocab_size=512,
            page_count=1000,
            features=frozenset[str](),
            model=server_pb2.Model(model_id="m"),
        )
        self.metrics = ServiceMetrics(CollectorRegistry(), version="0", commit="")
        self.live, self.admission, self.quota = LiveCalls(), Admission(max_calls), Quota()
        self.quota.limit(0, 0)
        self.traces = Traces()
        self.call = Call("/kvatlas.v1.GenerationService/Any", quota=self.quota, principal="p")
        current_call.set(self.call)
        self.board = HealthBoard(asyncio.get_running_loop())
        self.threads = TextThreads(1)
        self.prompts = Prompts(Tokenizer.toy(), None, self.threads, TextThreads(1))
        config = SimpleNamespace(
            slow_reader_seconds=slow_reader_seconds, resume_seconds=60.0, max_prompt_tokens=0
        )
        backstage = Backstage(
            config=cast(Any, config),
            version="0",
            commit="",
            start_time_ns=0,
            pool=cast(Any, Pool(self.link)),
            prompts=self.prompts,
            metrics=self.metrics,
            board=self.board,
            admission=self.admission,
            text_calls=Admission(4),
            watches=Admission(4),
            live=self.live,
            constraints=None,
            drain=cast(Any, None),
            tracing=cast(Any, self.traces),
        )
        self.servicer = GenerationServicer(backstage, cast(Any, None))

    def stream(self, context: Context, **fields: Any) -> "asyncio.Task[None]":
        """A stream under way; `fields` of its spec, and `stream` and `resume_after`."""
        beside = {name: fields.pop(name, None) for name in ("stream", "resume_after")}
        request = pb.StreamGenerateRequest(spec=spec(**fields), **beside)
        return asyncio.ensure_future(self.servicer.StreamGenerate(request, context))

    def whole(self, context: Context, **fields: Any) -> "asyncio.Task[pb.GenerateResponse]":
        """A call whose answer comes whole."""
        return asyncio.ensure_future(self.servicer.Generate(pb.GenerateRequest(spec=spec(**fields)), context))

    @asynccontextmanager
    async def held_prompts(self) -> AsyncIterator[None]:
        """Long prompts wait for the thread that makes ids of them."""
        gate = threading.Event()
        busy = asyncio.ensure_future(self.threads.run(1 << 30, gate.wait))
        await turns()
        try:
            yield
        finally:
            gate.set()
            await busy

    def admit(self) -> int:
        """The worker takes the last run and begins; the id of its first sample."""
        first = self.link.sent[-1].sequence_id
        self.link.answer(AddStatus.ACCEPTED)
        self.link.step(starts=[first + sample for sample in range(self.link.sent[-1].num_samples)])
        return first

    def end(self, *sequence_ids: int, code: FinishCode = FinishCode.MAX_TOKENS) -> None:
        self.link.step(ends=[(each, code) for each in sequence_ids])

    def ended(self) -> dict[str, float]:
        """Requests by outcome."""
        value = self.metrics.registry.get_sample_value
        names = ("completed", "cancelled", "deadline", "failed", "rejected")
        told = {name: value("kvatlas_requests_total", {"outcome": name}) or 0.0 for name in names}
        return {name: count for name, count in told.items() if count}

    @property
    def is_idle(self) -> bool:
        """Whether everything was given back."""
        held = self.admission.active, self.quota.active, self.quota.queued, len(self.live)
        return not any(held) and not len(self.link.runs)


def spec(**fields: Any) -> pb.GenerationSpec:
    """A short one, with an id."""
    stop = pb.StopCriteria(max_tokens=fields.pop("max_tokens", 4))
    return pb.GenerationSpec(**{"text": "abc", "request_id": "r", "stop": stop, **fields})


async def turns(count: int = 20) -> None:
    """Everybody who can go on has done so."""
    for _ in range(count):
        await asyncio.sleep(0)
