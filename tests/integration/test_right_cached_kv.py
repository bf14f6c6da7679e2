"""What is found in the prefix cache, or held by a running sequence, is what a fresh forward pass computes.

The real scheduler and the real runner in one thread, a tiny network, random requests with shared prefixes,
chunks, several samples, aborts and preemptions in a small pool whose unused memory is NaN. Between steps
every sealed page and every computed token of a running sequence is compared, all layers, K and V.
"""

import random
from array import array
from collections import deque

import pytest
import torch
from torch import Tensor

from kernels.reference import ReferenceBackend, attention
from tests.toy_runners import sizes_for
from worker.execution.testing import PageFold, small_config
from worker.execution.torch_runner import TorchRunner
from worker.ids import SequenceId
from worker.model.llama import Model
from worker.model.toy import toy_config, toy_model
from worker.pages.events import PageEventKind
from worker.scheduling.output import FinishCode
from worker.scheduling.request import AbortReason, AddStatus, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.step import Step

TOLERANCE = 1e-5
NUM_SLOTS = 112
CPU = torch.device("cpu")


class Machine:
    """Scheduler and runner, in turn or one step ahead; beside them, forward passes from scratch."""

    def __init__(self, model: Model, page_size: int, overlap: bool) -> None:
        config = model.config
        self.page_size = page_size
        self.overlap = overlap
        self.settings = small_config(
            num_pages=NUM_SLOTS // page_size,
            page_size=page_size,
            max_running=6,
            max_step_tokens=24,
            max_context_tokens=72,
            max_chunk_tokens=11,
        )
        self.scheduler = Scheduler(self.settings)
        self.runner = TorchRunner(
            model,
            ReferenceBackend(),
            sizes_for(
                config,
                max_running=6,
                max_context=72,
                num_pages=NUM_SLOTS // page_size,
                page_size=page_size,
                poison=True,
            ),
            CPU,
        )
        self.model = model
        self.now = 1.0
        self.in_flight: deque[tuple[Step, object]] = deque()
        self.fold = PageFold(NUM_SLOTS // page_size)
        self.fresh: dict[bytes, list[tuple[Tensor, Tensor]]] = {}

    def turn(self) -> None:
        """Schedules and launches a step, then commits those that are over."""
        self.now += 0.01
        step = self.scheduler.schedule(self.now)
        self.poison_freed()
        if step is not None:
            self.in_flight.append((step, self.runner.launch(step)))
        while len(self.in_flight) > (1 if self.overlap and step is not None else 0):
            done, handle = self.in_flight.popleft()
            self.scheduler.commit(done, handle.result(), self.now)  # type: ignore[attr-defined]
        for columns in self.scheduler.take_outputs().values():
            # A read of poisoned memory gives logits that are no numbers, and those end a sequence.
            assert FinishCode.FAILED not in list(columns.finish_codes), columns.ends

    def poison_freed(self) -> None:
        """Pages that became free since the last launch hold NaN from now on."""
        ring = self.scheduler.cache.events
        events = ring.read(self.fold.number, limit=ring.capacity)
        assert events is not None
        self.fold.apply(events)
        freed = [p for kind, p in zip(events.kinds, events.pages, strict=True) if kind == PageEventKind.FREED]
        self.runner.poison_pages(sorted(set(freed)))

    def check(self) -> int:
        """Compares everything that may be read; returns the number of tokens compared."""
        compared = 0
        index = self.scheduler.cache.index
        for page in index.pages():
            if not index.has_children(page):
                compared += self.compare(self.tokens_to(page), self.path(page))
        for sequence in self.scheduler._books.sequences.values():
            if sequence.held_pages and not self.in_flight:
                tokens = sequence.tokens[: sequence.computed]
                compared += self.compare(tokens, sequence.held_pages)
        return compared

    def path(self, page: int) -> list[int]:
        """Pages from the root of the prefix index to this one."""
        found = []
        at: int | None = page
        while at is not None:
            found.append(at)
            key = self.scheduler.cache.index.key(at)
            assert key is not None
            at = None if isinstance(key[0], bytes) else key[0]
        return found[::-1]

    def tokens_to(self, page: int) -> "array[int]":
        """The token ids that the index says those pages hold."""
        tokens = array("I")
        for step in self.path(page):
            key = self.scheduler.cache.index.key(step)
            assert key is not None
            tokens.frombytes(key[1])
        return tokens

    def compare(self, tokens: "array[int]", pages: list[int]) -> int:
        """K and V of the tokens in these pages, in the pool and from scratch."""
        first_slots = torch.tensor(pages)[:, None] * self.page_size
        slots = (first_slots + torch.arange(self.page_size)).reshape(-1)[: len(tokens)]
        for layer, (k, v) in enumerate(self.from_scratch(tokens)):
            pool = self.runner.kv_pool.layers[layer]
            torch.testing.assert_close(pool.k[slots], k, rtol=TOLERANCE, atol=TOLERANCE)
            torch.testing.assert_close(pool.v[slots], v, rtol=TOLERANCE, atol=TOLERANCE)
        return len(tokens)

    def from_scratch(self, tokens: "array[int]") -> list[tuple[Tensor, Tensor]]:
        """K and V of every layer for a text of its own, computed at once without any pool."""
        key = tokens.tobytes()
        if key not in self.fresh:
            layers: list[tuple[Tensor, Tensor]] = []
            positions = torch.arange(len(tokens))

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                layers.append((k.clone(), v.clone()))
                return attention(q, k, v, positions, scale=self.model.config.attention_scale)

            with torch.inference_mode():
                self.model.forward(torch.tensor(tokens.tolist()), positions, attend)
            self.fresh[key] = layers
        return self.fresh[key]


def request(rng: random.Random, sequence_id: int, prefixes: list[list[int]]) -> RequestSpec:
    """A prompt that often begins like another one."""
    prompt = prefixes[rng.randrange(len(prefixes))][: rng.randrange(1, 40)]
    prompt = prompt + [rng.randrange(256) for _ in range(rng.randrange(6))]
    params = SamplingParams(
        temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(99), max_tokens=rng.randrange(1, 32)
    )
    samples = rng.choice([1, 1, 1, 3])
    return RequestSpec(SequenceId(sequence_id), prompt, params, sample_count=samples, source="test")


@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (4, False), (4, True), (16, False)])
def test_cached_and_held_keys_and_values_are_those_of_a_fresh_forward(page_size: int, overlap: bool) -> None:
    """B023, B010, B012, H1, H12, H14, S1-08, M-12: content is compared, not bookkeeping.

    H14: pages that were copied for a diverging sample hold the content of their source.
    """
    rng = random.Random(20 + page_size)
    machine = Machine(toy_model(toy_config(), seed=1), page_size, overlap)
    prefixes = [[rng.randrange(256) for _ in range(40)] for _ in range(3)]
    compared, next_id, live = 0, 1, []
    for turn in range(130):
        if turn < 100 and rng.random() < 0.35:
            spec = request(rng, next_id, prefixes)
            next_id += spec.sample_count
            if machine.scheduler.add(spec, machine.now).status == AddStatus.ACCEPTED:
                live.append(int(spec.sequence_id))
        if live and rng.random() < 0.08:
            machine.scheduler.abort([live.pop(rng.randrange(len(live)))], AbortReason.CLIENT, machine.now)
        machine.turn()
        if turn % 5 == 0:
            compared += machine.check()
    while machine.scheduler.has_work(machine.now):
        machine.turn()
    compared += machine.check()
    assert machine.scheduler.check() == []
    counts = machine.fold.counts
    assert compared > 1000
    assert counts[PageEventKind.REVIVED] + counts[PageEventKind.SHARED] > 0
    assert counts[PageEventKind.EVICTED] > 0
    assert page_size == 1 or counts[PageEventKind.COPIED] > 0
    assert machine.scheduler.counts().preemptions_total > 0
