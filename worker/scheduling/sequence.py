"""A live sequence and the request that it is a sample of, as the scheduler keeps them.

Owns tokens and progress. Which pages are whose is decided elsewhere; here it is only written down.

# tokens   0            num_sealed * page_size       num_computed      num_launched     len(tokens)
# pages    | in the prefix index (shared or ours)    | ours, computed  | in flight      | needed next
# release  | one reference less, cached when last    | freed           | freed once the step is over
"""

from array import array
from collections.abc import Callable
from enum import IntEnum

from worker.ids import Owner, Row, SequenceId
from worker.scheduling.account import Account
from worker.scheduling.output import PrefixCounts
from worker.scheduling.request import RequestSpec
from worker.scheduling.step import TokenLogprob
from worker.stats import SequenceState, WaitReason

NO_ROW = Row(-1)
NO_OWNER = Owner(0)
NO_IDS: frozenset[int] = frozenset()
NOTHING_KNOWN: tuple[int, int, list[int]] = (-1, 0, [])

Rank = tuple[float, int]
"""Smaller goes first: arrival less what its priority is worth, then number of arrival. Never changes,
since waiting raises everybody alike."""


class Place(IntEnum):
    """Which of the scheduler's collections holds a sequence."""

    QUEUE = 0  # no row
    SIBLING = 1  # a row, waits for another sample to compute the prompt
    PREFILL = 2  # a row, tokens left to be computed
    BATCH = 3  # one token in every step
    LAST = 4  # its last token is in flight
    ENDED = 5


class Request:
    """What the samples of one RequestSpec have in common."""

    __slots__ = (
        "account",
        "admit_time",
        "arrival",
        "copied_pages",
        "evictions_caused",
        "leader",
        "num_live",
        "num_with_row",
        "page_counts",
        "peak_pages",
        "preemptions",
        "prefix",
        "prompt_logprobs",
        "prompt_logprobs_sent",
        "recomputed_tokens",
        "reused_pages",
        "samples",
        "saved_tokens",
        "spec",
        "tail_waste_slots",
        "uncached_tokens",
    )

    def __init__(self, spec: RequestSpec, arrival: float) -> None:
        self.spec = spec
        self.arrival = arrival
        self.admit_time: float | None = None
        self.samples: list[Sequence] = []
        self.leader: Sequence | None = None  # computes the prompt for the samples that wait for it
        self.num_live = 0
        self.num_with_row = 0
        self.prefix: PrefixCounts | None = None
        self.uncached_tokens = 0  # while it waits
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.prompt_logprobs_sent = False
        # The bill.
        self.account = Account()
        # Pages are counted by page only where samples share them.
        self.page_counts: dict[int, int] | None = {} if spec.sample_count > 1 else None
        self.peak_pages = 0
        self.reused_pages = 0
        self.saved_tokens = 0
        self.copied_pages = 0
        self.tail_waste_slots = 0
        self.evictions_caused = 0
        self.preemptions = 0
        self.recomputed_tokens = 0

    def forget_samples(self) -> None:
        """All have ended: without references in a circle they go at once, not with the next collection."""
        self.samples = []
        self.leader = None

    def took(self, pages: list[int]) -> None:
        """A sample refers to these pages, too."""
        counts = self.page_counts
        if counts is None:
            return
        for page in pages:
            counts[page] = counts.get(page, 0) + 1
        self.peak_pages = max(self.peak_pages, len(counts))

    def gave(self, pages: list[int]) -> None:
        """A sample refers to these pages no longer."""
        counts = self.page_counts
        if counts is None:
            self.peak_pages = max(self.peak_pages, len(pages))
            return
        for page in pages:
            counts[page] -= 1
            if not counts[page]:
                del counts[page]


class Sequence:
    """One sample. Compared and hashed by identity."""

    __slots__ = (
        "append",
        "batch_index",
        "blocked_need",
        "can_seal",
        "choice_index",
        "copy_source",
        "edge",
        "eos_ids",
        "id",
        "known_prefix",
        "last_step",
        "last_tick",
        "limit",
        "looked_up",
        "lost_tokens",
        "num_computed",
        "num_launched",
        "num_prompt",
        "num_sealed",
        "num_written",
        "owner",
        "pages",
        "place",
        "preempted_at",
        "preemptions",
        "rank",
        "request",
        "retry_step",
        "row",
        "skips",
        "started",
        "state",
        "stop_ids",
        "tokens",
        "wait_reason",
    )

    def __init__(
        self, request: Request, number: int, rank: Rank, limit: int, eos_token_ids: frozenset[int]
    ) -> None:
        spec = request.spec
        self.id = SequenceId(spec.sequence_id + number)
        self.choice_index = spec.first_choice_index + number
        self.request = request
        self.rank = rank
        self.tokens = array("I", spec.prompt_token_ids)  # prompt, then committed output
        if spec.resume_token_ids:
            self.tokens.extend(array("I", spec.resume_token_ids))
        self.append: Callable[[int], None] = self.tokens.append
        self.num_prompt = len(spec.prompt_token_ids)
        self.limit = limit  # tokens, prompt and output, at which it ends
        self.eos_ids = eos_token_ids if spec.params.stop_at_eos else NO_IDS
        stops = spec.params.stop_token_ids
        self.stop_ids = self.eos_ids | stops if stops else self.eos_ids
        self.state = SequenceState.WAITING
        self.place = Place.QUEUE
        self.owner = NO_OWNER
        self.row = NO_ROW
        self.pages: list[int] = []  # in token order
        self.num_sealed = 0  # leading pages that stand in the prefix index
        self.can_seal = spec.cache_write
        self.num_computed = 0  # tokens with committed KV; use computed() where the state may be DECODE
        self.num_launched = 0  # the same with steps in flight; not kept up in the batch
        self.num_written = 0  # leading pages that are in the row, as of the last step planned
        self.started = False  # the runner knows the row
        self.looked_up = False
        # What the last look-up found, for which version of the index and how many pages at most.
        self.known_prefix = NOTHING_KNOWN
        self.copy_source: int | None = None  # page that holds the rest of the prompt; referenced
        self.last_step = 0  # last step it was planned in; not kept up in the batch
        self.batch_index = -1
        self.edge = 0  # when it needs a page; see DecodeBatch
        self.last_tick = 0
        self.preemptions = 0
        self.preempted_at = 0.0  # the last time
        self.lost_tokens = 0  # that were computed when it was preempted, until it is let in again
        self.skips = 0
        self.wait_reason = WaitReason.NONE
        self.blocked_need = 0
        self.retry_step = 0

    @property
    def computed(self) -> int:
        """Tokens with committed KV: all but the newest while it decodes."""
        return len(self.tokens) - 1 if self.state == SequenceState.DECODE else self.num_computed

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def held_pages(self) -> list[int]:
        """Its references: the pages of its row, and the page it will copy from."""
        return self.pages if self.copy_source is None else [*self.pages, self.copy_source]

    @property
    def num_final_tokens(self) -> int:
        """Tokens that will have KV once its next output token is there: prompt pages, and one look ahead."""
        return min(len(self.tokens) + 1, self.limit - 1)

    def forget_progress(self) -> None:
        """Back to nothing computed; tokens stay."""
        self.pages = []
        self.num_sealed = self.num_computed = self.num_launched = self.num_written = 0
        self.can_seal = self.request.spec.cache_write
        self.copy_source = None
        self.started = self.looked_up = False

    @property
    def name(self) -> str:
        """For reports."""
        return f"sequence {self.id}"

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id}, {self.place.name}, tokens={len(self.tokens)}/{self.limit}, "
            f"computed={self.computed}, launched={self.num_launched}, pages={self.pages})"
        )
