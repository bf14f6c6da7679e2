"""What happens in a chaos run, drawn from its seed before anything starts: disturbances and streams.

Owns chance. The order and the kinds are the seed's; when a disturbance begins also depends on how long the
one before took to heal.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

PROMPT_TOKENS = (3, 120)
OUTPUT_TOKENS = (60, 400)
TOKEN_IDS = range(3, 250)  # of the byte vocabulary: no control token
SHARED_PROMPTS = 6  # beginnings that prompts share, so that pages are shared and found again
SHARED_TOKENS = 48
NUM_TARGETS = 2  # workers, and services
SLOWNESS_SECONDS = (0.005, 0.08)


class Kind(Enum):
    """A disturbance; the values are what reports call it."""

    KILL_WORKER = "worker SIGKILL"
    PAUSE_WORKER = "worker SIGSTOP, SIGCONT"
    DRAIN_WORKER = "worker drained, started again"
    CUT_WORKER = "network of a worker cut"
    KILL_BOTH = "both workers SIGKILL"
    KILL_SERVICE = "service SIGKILL"
    DRAIN_SERVICE = "service drained, started again"


WITHOUT_NETWORK = tuple(kind for kind in Kind if kind is not Kind.CUT_WORKER)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One of them: how long after the one before has healed, on whom, for how long."""

    kind: Kind
    after_seconds: float
    target: int  # worker or service, by number
    seconds: float  # paused, cut, or until it is started again


class Reader(Enum):
    """How a client reads."""

    STEADY = "steady"
    SLOW = "slow"  # waits after each message
    STALLED = "stalled"  # stops for some seconds in the middle
    CANCELS = "cancels"  # leaves in the middle


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """A request, by its number in `requests`, and how its answer is read."""

    request: int
    reader: Reader
    after_tokens: int  # when a reader stalls or leaves
    seconds: float  # of one wait


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A request whose answer is known from the undisturbed run."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    samples: int
    penalty: float
    stop: str
    regex: str  # that the answer must match; its state has to survive, too
    min_tokens_per_message: int
    has_logprobs: bool

    @property
    def kinds(self) -> list[str]:
        """What there is to see in it, for the report."""
        marks = {
            "greedy": self.temperature == 0,
            "seeded": self.temperature > 0,
            "several samples": self.samples > 1,
            "penalty": self.penalty > 0,
            "stop string": bool(self.stop),
            "constraint": bool(self.regex),
            "merged messages": self.min_tokens_per_message > 0,
            "log-probabilities": self.has_logprobs,
        }
        return [name for name, is_so in marks.items() if is_so]


def disturbances(
    seed: int, count: int, kinds: Sequence[Kind], max_pause_seconds: float = 4.0
) -> list[Disturbance]:
    """Every kind once before any kind comes again."""
    chance = random.Random(f"disturbances {seed}")
    order: list[Kind] = []
    while len(order) < count:
        order += chance.sample(list(kinds), len(kinds))
    return [
        Disturbance(
            kind,
            chance.uniform(0.1, 1.0) * max_pause_seconds,
            chance.randrange(NUM_TARGETS),
            _length(kind, chance),
        )
        for kind in order[:count]
    ]


def requests(seed: int, count: int) -> list[RequestPlan]:
    """Greedy and seeded ones, some with samples, penalties, stop strings, a constraint, merged messages."""
    chance = random.Random(f"requests {seed}")
    shared = [_ids(chance, SHARED_TOKENS) for _ in range(SHARED_PROMPTS)]
    return [_request(number, chance, shared) for number in range(count)]


def streams(seed: int, num_requests: int) -> "StreamSource":
    """Streams without end, in the seed's order."""
    return StreamSource(seed, num_requests)


class StreamSource:
    """The next stream to open, whoever asks."""

    def __init__(self, seed: int, num_requests: int) -> None:
        self._chance = random.Random(f"streams {seed}")
        self._num_requests = num_requests
        self.count = 0

    def take(self) -> StreamPlan:
        """Most are read steadily; one in six is slow, one in twelve stalls, one in eight is left."""
        chance = self._chance
        self.count += 1
        reader = chance.choices(list(Reader), (15, 4, 2, 3))[0]
        seconds = chance.uniform(1.0, 5.0) if reader is Reader.STALLED else chance.uniform(*SLOWNESS_SECONDS)
        return StreamPlan(chance.randrange(self._num_requests), reader, chance.randrange(1, 40), seconds)


def _length(kind: Kind, chance: random.Random) -> float:
    if kind in (Kind.PAUSE_WORKER, Kind.CUT_WORKER):
        return chance.choice((chance.uniform(0.2, 1.5), chance.uniform(3.0, 9.0)))  # noticed, or not
    return chance.uniform(0.0, 1.5)


def _request(number: int, chance: random.Random, shared: Sequence[tuple[int, ...]]) -> RequestPlan:
    beginning = chance.choice(shared) if chance.random() < 0.5 else ()
    is_greedy = number % 2 == 0
    return RequestPlan(
        prompt=beginning + _ids(chance, chance.randint(*PROMPT_TOKENS)),
        max_tokens=chance.randint(*OUTPUT_TOKENS),
        temperature=0.0 if is_greedy else chance.uniform(0.5, 1.2),
        seed=chance.getrandbits(63),
        samples=chance.choice((2, 3)) if chance.random() < 0.1 else 1,
        penalty=chance.uniform(0.1, 0.6) if chance.random() < 0.25 else 0.0,
        stop=chance.choice(("ab", "e", "\n", "xyz")) if chance.random() < 0.15 else "",
        regex=chance.choice((r"[a-z ]{60,300}", r"(\d{1,9}, )*\d+")) if chance.random() < 0.15 else "",
        min_tokens_per_message=chance.choice((4, 8)) if chance.random() < 0.2 else 0,
        has_logprobs=chance.random() < 0.15,
    )


def _ids(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.choice(TOKEN_IDS) for _ in range(count))
