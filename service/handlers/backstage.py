"""What all handlers work with. Made once by server.py; owns nothing itself."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from service import errors
from service.admission import Admission
from service.config import ServiceConfig
from service.drain import DrainControl
from service.fleet.codec import WorkerFacts
from service.fleet.workers import WorkerPool
from service.handlers.live import LiveCalls
from service.handlers.prompts import Prompts
from service.handlers.validate import MAX_SAMPLES
from service.health import HealthBoard
from service.metrics import ServiceMetrics
from service.text.constraints import ConstraintChecks

if TYPE_CHECKING:
    from service.tracing import Tracing


@dataclass(frozen=True, slots=True)
class Backstage:
    """The parts of one service process."""

    config: ServiceConfig
    version: str
    commit: str
    start_time_ns: int
    pool: WorkerPool
    prompts: Prompts
    metrics: ServiceMetrics
    board: HealthBoard
    admission: Admission  # generations
    text_calls: Admission  # Tokenize and Detokenize
    watches: Admission  # watch streams of all services
    live: LiveCalls
    constraints: ConstraintChecks | None  # None: the library is missing, the feature is off
    drain: DrainControl
    tracing: "Tracing | None" = None  # None: off

    def refuse_if_draining(self) -> None:
        """Raises Failure while the process shuts down."""
        if self.board.is_draining:
            raise errors.draining()

    def features_of(self, facts: WorkerFacts) -> frozenset[str]:
        """Optional features that are on: the worker's, and those of the model's text."""
        off = frozenset[str]() if self.constraints is not None else frozenset({"constraints"})
        return (facts.features - off) | self.prompts.features

    def facts_of(self, model: str) -> WorkerFacts:
        """Facts of the model that a request names; empty: the only one. Raises Failure."""
        facts = self.pool.facts
        if facts is None:
            raise errors.not_ready()
        if model and model != facts.model_id:
            raise errors.model_not_found(model, facts.model_id)
        return facts

    def estimated_wait_ms(self) -> int | None:
        """Of a request that comes now, on the worker where it is shortest; None: unknown."""
        beats = [link.beat for link in self.pool.usable if link.beat is not None]
        known = [
            beat.estimated_wait_ms for beat in beats if beat.estimated_wait_ms or not beat.waiting_requests
        ]
        return min(known, default=None)

    def max_samples(self, facts: WorkerFacts) -> int:
        """Samples of one request: they are admitted together, so they must fit the worker's rows."""
        return min(MAX_SAMPLES, facts.max_running_sequences)

    def max_prompt_tokens(self, facts: WorkerFacts) -> int:
        """Prompt tokens at most: there is room for at least one more."""
        room = facts.max_context_tokens - 1
        return min(self.config.max_prompt_tokens or room, room)
