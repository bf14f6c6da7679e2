"""A device of lists: the second runner, for simulation and for running everything else without torch.

Where K and V would go it stores token ids, through the page table; "attention" is a hash of the ids
read back through the same table. Any aliasing, early release, wrong slot, stale row, lost span or
missing copy changes a token. Input ids come from its token pool, as on a real device.

``next_token`` is the whole model: a function of the ids before and of how a token is picked, so the
answer to a request can be computed without a runner (``answer_alone``).
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from worker.ids import SequenceId
from worker.scheduling.audit import RowSpan
from worker.scheduling.sampling import Progress, SamplingParams
from worker.scheduling.step import RowStart, Step, StepResult, TokenLogprob

UNWRITTEN = -1
POISON = -2
SLOW_STEP_SECONDS = 0.1
_MASK = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class FakeModel:
    """Vocabulary 0 .. vocab_size - 1; about one token in ``eos_every`` is one of the EOS ids (0: none)."""

    vocab_size: int = 256
    eos_token_ids: tuple[int, ...] = ()
    eos_every: int = 0


def next_token(
    model: FakeModel,
    ids: Sequence[int],
    params: SamplingParams,
    choice_index: int,
    num_prompt: int,
    eos_token_ids: frozenset[int],
    mask: "array[int] | None" = None,
) -> int | None:
    """The token after ``ids``: a hash of them, and of the noise's key unless greedy; None: none is allowed.

    ``mask``: which tokens a constraint allows, a bit each; without one all are.
    """
    mixed = hash(tuple(ids)) & _MASK
    if params.temperature > 0:
        mixed = hash((mixed, params.seed, choice_index, len(ids))) & _MASK
    token_id = mixed % model.vocab_size
    if model.eos_every and (mixed >> 32) % model.eos_every == 0:
        token_id = model.eos_token_ids[(mixed >> 16) % len(model.eos_token_ids)]
    is_short = len(ids) - num_prompt < params.min_tokens
    forbidden = eos_token_ids | params.stop_token_ids if is_short else frozenset[int]()
    if not forbidden and mask is None:
        return token_id
    for candidate in chain(range(token_id, model.vocab_size), range(token_id)):
        if candidate not in forbidden and (mask is None or mask[candidate // 32] >> candidate % 32 & 1):
            return candidate
    return None


def constraint_mask(
    progress: Progress, ids: Sequence[int], vocab_size: int
) -> "tuple[array[int], str | None]":
    """Which tokens may follow the output ``ids``, a bit each, and why if none may."""
    progress.take_back(max(0, progress.num_tokens - len(ids)))  # a step that is run once more
    progress.take(ids[progress.num_tokens :])
    words = array("I", bytes(4 * -(-vocab_size // 32)))
    address, count = words.buffer_info()
    return words, progress.write_mask(address, count * words.itemsize)


def answer_alone(
    model: FakeModel,
    prompt: Sequence[int],
    params: SamplingParams,
    choice_index: int,
    eos_token_ids: frozenset[int],
    max_context_tokens: int,
) -> list[int]:
    """All output tokens of one sample, computed without pages, rows or steps."""
    eos = eos_token_ids if params.stop_at_eos else frozenset[int]()
    ids = list(prompt)
    limit = min(len(prompt) + params.max_tokens, max_context_tokens)
    progress = params.constraint.begin() if params.constraint is not None else None
    while len(ids) < limit:
        mask = None
        if progress is not None:
            mask, _ = constraint_mask(progress, ids[len(prompt) :], model.vocab_size)
        token_id = next_token(model, ids, params, choice_index, len(prompt), eos, mask)
        if token_id is None:
            break
        ids.append(token_id)
        stops = token_id in eos or token_id in params.stop_token_ids
        if stops and len(ids) - len(prompt) > params.min_tokens:
            break
    return ids[len(prompt) :]


def token_logprob(ids: Sequence[int], token_id: int) -> TokenLogprob:
    """What is told of ``token_id`` behind ``ids``: no number of a model, but of just these."""
    mixed = hash((tuple(ids), token_id)) & 0xFFFF
    return TokenLogprob(-mixed / 4096, 1 + mixed % 7)


class FakeHandle:
    """A step that was launched."""

    is_replayed = False

    def __init__(self, runner: "FakeRunner", step: Step, ready_time: float) -> None:
        self.step = step
        self._runner = runner
        self.ready_time = ready_time
        self.outcome: StepResult | None = None
        self.poison: list[int] = []  # pages to be filled behind this step

    def is_ready(self) -> bool:
        """Whether it has run and its time is over."""
        return self.outcome is not None and time.monotonic() >= self.ready_time

    def result(self) -> StepResult:
        """Runs everything launched up to this step; waits for its time."""
        self._runner.run_until(self)
        wait = self.ready_time - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        assert self.outcome is not None, f"step {self.step.number} was never run"
        return self.outcome


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Parts of rows that were copied at once."""

    slots: list[list[int]]

    def is_ready(self) -> bool:
        """Always."""
        return True

    def result(self) -> list[list[int]]:
        """The slots of each span."""
        return self.slots


class FakeRunner:
    """Implements worker.execution.runner.Runner.

    ``lazy``: steps run as late as a device may run them, when a result is waited for, so the host's
    changes after the launch come first. ``is_held``: whether a page may be touched now; a step that
    touches one that went back to the pool under it is a bug (H6). ``fail``: whether and why the span
    of a sequence that ends at a position fails. ``step_seconds``: what a step seems to take. ``is_slow``:
    whether a step takes SLOW_STEP_SECONDS now, so that what runs goes on running while someone looks.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_running: int,
        row_width: int,
        model: FakeModel,
        lazy: bool = False,
        is_held: Callable[[int], bool] | None = None,
        fail: Callable[[SequenceId, int], str | None] | None = None,
        step_seconds: float = 0.0,
        is_slow: Callable[[], bool] | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.model = model
        self.num_slots = num_pages * page_size
        dummy = self.num_slots  # first slot of the dummy page
        self.kv = [UNWRITTEN] * ((num_pages + 1) * page_size)
        self.page_table = [[dummy] * row_width for _ in range(max_running + 1)]
        self.token_pool = [[0] * (row_width + 1) for _ in range(max_running + 1)]
        self.starts: list[RowStart | None] = [None] * (max_running + 1)
        self.progress: dict[int, Progress] = {}  # by row, of those with a constraint
        self.num_steps = 0
        self.num_copies = 0
        self.num_table_writes = 0  # scatters, at most one a step (S1-22)
        self._lazy = lazy
        self._is_held = is_held
        self._fail = fail
        self._step_seconds = step_seconds
        self._is_slow = is_slow
        self._busy_until = 0.0
        self._queue: deque[FakeHandle] = deque()

    # Runner.
    def launch(self, step: Step) -> FakeHandle:
        """Queues a step."""
        ready = 0.0
        seconds = self._step_seconds
        if self._is_slow is not None and self._is_slow():
            seconds = max(seconds, SLOW_STEP_SECONDS)
        if seconds:
            self._busy_until = ready = max(self._busy_until, time.monotonic()) + seconds
        handle = FakeHandle(self, step, ready)
        self._queue.append(handle)
        if not self._lazy:
            self.run_until(handle)
        return handle

    def read_rows(self, rows: list[int], num_slots: list[int]) -> list[list[int]]:
        """The first slots of rows, after everything that was launched."""
        while self._queue:
            self.run_until(self._queue[0])
        return [self.page_table[row][:count] for row, count in zip(rows, num_slots, strict=True)]

    def begin_read(self, spans: Sequence[RowSpan]) -> CopiedRows:
        """Parts of rows, after everything that was launched."""
        lengths = [span.first + len(span.slots) for span in spans]
        whole = self.read_rows([int(span.row) for span in spans], lengths)
        return CopiedRows([row[span.first :] for row, span in zip(whole, spans, strict=True)])

    def close(self) -> None:
        """Nothing to free."""
        self._queue.clear()

    def poison(self, pages: Sequence[int]) -> None:
        """Fills pages that went back to the pool, after what was launched; reading one is an error then."""
        if self._queue:
            self._queue[-1].poison.extend(pages)
        else:
            self._poison(pages)

    def _poison(self, pages: Sequence[int]) -> None:
        for page in pages:
            first = page * self.page_size
            self.kv[first : first + self.page_size] = [POISON] * self.page_size

    # The device.
    def run_until(self, handle: FakeHandle) -> None:
        """Steps run in the order of their launches."""
        while handle.outcome is None and self._queue:
            oldest = self._queue.popleft()
            oldest.outcome = self._run(oldest.step)
            self._poison(oldest.poison)

    def _run(self, step: Step) -> StepResult:
        self.num_steps += 1
        assert len(set(step.rows)) == len(step.rows), f"step {step.number}: a row twice in {step.rows}"
        for start in step.row_starts:
            self._start_row(start)
        self._write_table(step)
        for copy in step.page_copies:
            self._copy(copy.source, copy.target)
        for at in range(len(step.rows)):
            self._write(step.rows[at], step.starts[at], step.ends[at])
        return self._sample(step)

    def _start_row(self, start: RowStart) -> None:
        assert 0 <= start.row < len(self.page_table) - 1, f"row {start.row} is not a sequence's"
        self.starts[start.row] = start
        self.progress.pop(start.row, None)
        if start.params.constraint is not None:
            self.progress[start.row] = start.params.constraint.begin()
        self.token_pool[start.row][: len(start.token_ids)] = start.token_ids

    def _write_table(self, step: Step) -> None:
        size = self.page_size
        self.num_table_writes += bool(step.new_page_ids)
        places = list(zip(step.new_page_rows, step.new_page_indexes, strict=True))
        assert len(set(places)) == len(places), f"step {step.number} writes a place twice: {places}"
        for (row, index), page in zip(places, step.new_page_ids, strict=True):
            assert 0 <= page < self.num_pages, f"page {page} in row {row}: not a sequence's page"
            first = page * size
            line = self.page_table[row]
            assert (index + 1) * size <= len(line), f"page {index} of row {row} is beyond its width"
            line[index * size : (index + 1) * size] = range(first, first + size)

    def _copy(self, source: int, target: int) -> None:
        self.num_copies += 1
        self._touch(source)
        self._touch(target)
        size = self.page_size
        self.kv[target * size : (target + 1) * size] = self.kv[source * size : (source + 1) * size]

    def _touch(self, page: int) -> None:
        if self._is_held is not None:
            assert self._is_held(page), f"page {page} is used by a step and was given back to the pool"

    def _write(self, row: int, start: int, end: int) -> None:
        line, tokens = self.page_table[row], self.token_pool[row]
        for position in range(start, end):
            slot = line[position]
            assert slot < self.num_slots, f"row {row} has no page for position {position}"
            self.kv[slot] = tokens[position]

    def _read(self, row: int, end: int) -> list[int]:
        kv, line = self.kv, self.page_table[row]
        if self._is_held is not None:
            for position in range(0, end, self.page_size):
                self._touch(line[position] // self.page_size)
        ids = [kv[slot] for slot in line[:end]]
        assert min(ids) >= 0, f"row {row}: position {ids.index(min(ids))} was never written, or freed"
        return ids

    def _sample(self, step: Step) -> StepResult:
        token_ids: list[int] = []
        logprobs: dict[int, TokenLogprob] = {}
        prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        failed: dict[int, str] = {}
        dead_ends: list[int] = []
        sampled = set(step.sampled)
        for at, row in enumerate(step.rows):
            start, end = self.starts[row], step.ends[at]
            assert start is not None, f"row {row} was never started"
            assert start.sequence_id == step.sequence_ids[at], f"row {row} is that of {start.sequence_id}"
            ids = self._read(row, end)
            why = self._fail(start.sequence_id, end) if self._fail is not None else None
            if why is not None:
                failed[at] = why
            if start.params.prompt_logprobs is not None:
                last = min(end, start.num_prompt_tokens - 1)
                prompt_logprobs[at] = [
                    token_logprob(ids[:position], self.token_pool[row][position])
                    for position in range(step.starts[at] + 1, last + 1)
                ]
            if at not in sampled:
                continue
            mask, why = None, None
            if row in self.progress:
                output = ids[start.num_prompt_tokens :]
                mask, why = constraint_mask(self.progress[row], output, self.model.vocab_size)
            num_prompt, eos = start.num_prompt_tokens, start.eos_token_ids
            picked = next_token(self.model, ids, start.params, start.choice_index, num_prompt, eos, mask)
            token_id = picked if picked is not None else 0
            if picked is None:
                failed[at] = why or "nothing is left of what the constraint allows"
                dead_ends.append(at)
            self.token_pool[row][end] = token_id
            token_ids.append(token_id)
            if start.params.logprobs is not None:
                logprobs[at] = token_logprob(ids, token_id)
        return StepResult(token_ids, logprobs, prompt_logprobs, failed, self._step_seconds, dead_ends)
