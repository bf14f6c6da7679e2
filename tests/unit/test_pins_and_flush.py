"""Operators' hands on the cache: pins stay, a flush leaves nothing that it should take."""

from array import array
from dataclasses import replace

import pytest

from worker.channels import OutputQueue
from worker.execution.fake_runner import FakeModel
from worker.execution.testing import Harness, small_config
from worker.ids import SequenceId
from worker.messages import CallError, CallFailure, CallReason, LinkMessage, Pin, PinAnswer, Ticket
from worker.pages.events import PageState
from worker.pinning import PinDesk
from worker.scheduling.pins import PinStatus
from worker.scheduling.request import AddStatus, RequestSpec
from worker.scheduling.sampling import SamplingParams

MODEL = FakeModel(1000)


def make(**changes: object) -> Harness:
    return Harness(small_config(**changes), MODEL)  # type: ignore[arg-type]


def request(number: int, prompt: list[int], max_tokens: int = 1, salt: bytes = b"") -> RequestSpec:
    return RequestSpec(SequenceId(number), prompt, SamplingParams(max_tokens=max_tokens), cache_salt=salt)


def cached(harness: Harness, prompt: list[int], salt: bytes = b"") -> int:
    return len(harness.scheduler.cache.lookup(array("I", prompt), salt, len(prompt) // 4).pages)


def run(harness: Harness, number: int, prompt: list[int], salt: bytes = b"") -> None:
    assert harness.add(request(number, prompt, salt=salt)).status == AddStatus.ACCEPTED
    harness.run()


def test_a_pinned_prefix_survives_any_pressure() -> None:
    harness = make(num_pages=16)
    prompt = list(range(16))
    run(harness, 1, prompt)
    outcome = harness.scheduler.pin("system", prompt, b"", None, harness.now)
    assert (outcome.status, outcome.pinned_pages) == (PinStatus.PINNED, 4)
    for number in range(2, 20):
        run(harness, number, [100 * number + at for at in range(40)])
    assert cached(harness, prompt) == 4
    assert harness.scheduler.cache.pool.num_pinned == 4
    assert harness.scheduler.unpin("system", harness.now)
    assert not harness.scheduler.unpin("system", harness.now)
    harness.audit()
    for number in range(20, 30):
        run(harness, number, [100 * number + at for at in range(40)])
    assert cached(harness, prompt) == 0


def test_a_pinned_page_in_use_is_active_and_pinned_again_afterwards() -> None:
    harness = make()
    prompt = list(range(8))
    run(harness, 1, prompt)
    harness.scheduler.pin("system", prompt, b"", None, harness.now)
    harness.add(request(2, [*prompt, 50, 51], max_tokens=3))
    harness.turn()
    pool = harness.scheduler.cache.pool
    pages = harness.scheduler.list_pins()[0].pages
    assert [pool.state(page) for page in pages] == [PageState.ACTIVE] * 2
    harness.run()
    assert [pool.state(page) for page in pages] == [PageState.PINNED] * 2


def test_only_whole_cached_pages_can_be_pinned() -> None:
    harness = make()
    outcome = harness.scheduler.pin("a", list(range(9)), b"", None, harness.now)
    assert (outcome.status, outcome.needed_pages, outcome.cached_pages) == (PinStatus.NOT_CACHED, 2, 0)
    run(harness, 1, list(range(9)))
    outcome = harness.scheduler.pin("a", list(range(9)), b"", None, harness.now)
    assert outcome.status == PinStatus.PINNED
    assert outcome.pin is not None
    assert outcome.pin.num_tokens == 8
    assert harness.scheduler.pin("b", [1, 2], b"", None, harness.now).status == PinStatus.NOT_CACHED


def test_pins_take_at_most_a_quarter_of_the_pool() -> None:
    harness = make(num_pages=16)
    run(harness, 1, list(range(20)))
    outcome = harness.scheduler.pin("a", list(range(20)), b"", None, harness.now)
    assert (outcome.status, outcome.max_pinned_pages) == (PinStatus.LIMIT, 4)
    assert harness.scheduler.list_pins() == []


def test_a_pin_never_makes_an_accepted_request_impossible() -> None:
    """H15: what was accepted can always run alone, whatever is pinned later."""
    harness = make(num_pages=16, max_context_tokens=64)
    run(harness, 1, list(range(8)))
    harness.add(request(2, [7] * 4, max_tokens=52))
    outcome = harness.scheduler.pin("a", list(range(8)), b"", None, harness.now)
    assert outcome.status == PinStatus.PINNED
    harness.run()
    harness.add(request(3, [8] * 4, max_tokens=60))
    assert 3 not in harness.answers
    assert harness.scheduler.unpin("a", harness.now)
    assert harness.add(request(3, [8] * 4, max_tokens=60)).status == AddStatus.ACCEPTED
    assert harness.scheduler.pin("a", list(range(8)), b"", None, harness.now).status == PinStatus.LIMIT
    harness.run()
    assert len(harness.answers[3].tokens) == 60


def test_pinning_a_name_again_replaces_it_and_time_ends_it() -> None:
    harness = make()
    run(harness, 1, list(range(8)))
    run(harness, 2, list(range(50, 58)))
    harness.scheduler.pin("a", list(range(8)), b"", None, harness.now)
    harness.scheduler.pin("a", list(range(8)), b"", None, harness.now)
    harness.scheduler.pin("a", list(range(50, 58)), b"", harness.now + 5, harness.now)
    assert harness.scheduler.cache.num_pinned_pages == 2
    assert harness.scheduler.next_deadline(harness.now) == pytest.approx(harness.now + 5)
    harness.now += 6
    assert harness.scheduler.has_work(harness.now)
    harness.turn()
    assert harness.scheduler.list_pins() == []
    assert harness.scheduler.cache.num_pinned_pages == 0


def test_a_pin_that_is_replaced_leaves_its_part_of_the_limit_to_the_new_one() -> None:
    """Whether against the limit or a live request; pages that another name keeps as well stay counted."""
    harness = make(num_pages=16, max_context_tokens=64)
    prompts = [list(range(first, first + 16)) for first in (0, 50, 70)]
    for number, prompt in enumerate(prompts, 1):
        run(harness, number, prompt)
    set_pin, now = harness.scheduler.pin, harness.now
    assert set_pin("a", prompts[0], b"", None, now).status == PinStatus.PINNED
    harness.add(request(9, [8] * 4, max_tokens=44))  # 12 of 16 pages
    for prompt in prompts[1:]:
        assert set_pin("a", prompt, b"", None, now).pinned_pages == 4
    assert set_pin("b", prompts[2][:8], b"", None, now).status == PinStatus.PINNED
    full = set_pin("a", prompts[0], b"", None, now)
    assert (full.status, full.pinned_pages) == (PinStatus.LIMIT, 4)
    harness.audit()
    harness.run()
    assert len(harness.answers[9].tokens) == 44


def test_two_pins_share_pages_and_each_holds_them() -> None:
    harness = make(num_pages=32)
    run(harness, 1, list(range(12)))
    harness.scheduler.pin("short", list(range(8)), b"", None, harness.now)
    harness.scheduler.pin("long", list(range(12)), b"", None, harness.now)
    assert harness.scheduler.cache.num_pinned_pages == 3
    harness.scheduler.unpin("long", harness.now)
    assert harness.scheduler.cache.num_pinned_pages == 2
    harness.audit()


def test_a_flush_frees_what_nobody_uses() -> None:
    """B021: after a flush of everything nothing old is found."""
    harness = make()
    run(harness, 1, list(range(12)))
    run(harness, 2, list(range(50, 62)))
    outcome = harness.scheduler.flush(harness.now)
    harness.audit()
    assert (outcome.num_freed, outcome.num_unindexed) == (6, 0)
    assert harness.scheduler.cache.pool.num_free == 16
    assert harness.scheduler.counts().flush_evictions_total == 6
    assert cached(harness, list(range(12))) == 0


def test_a_flush_takes_only_the_salts_that_match() -> None:
    harness = make()
    run(harness, 1, list(range(8)), salt=b"a\0")
    run(harness, 2, list(range(8)), salt=b"b\0")
    assert harness.scheduler.flush(harness.now, matches=lambda salt: salt.startswith(b"a\0")).num_freed == 2
    assert cached(harness, list(range(8)), b"a\0") == 0
    assert cached(harness, list(range(8)), b"b\0") == 2


def test_a_flush_leaves_pages_in_use_unless_told_otherwise() -> None:
    harness = make()
    prompt = list(range(12))
    harness.add(request(1, prompt, max_tokens=10))
    harness.turn()
    assert harness.scheduler.flush(harness.now).num_freed == 0
    assert cached(harness, prompt) == 3
    outcome = harness.scheduler.flush(harness.now, include_active=True)
    harness.audit()
    assert (outcome.num_freed, outcome.num_unindexed) == (0, 3)
    assert cached(harness, prompt) == 0
    harness.run()
    assert len(harness.answers[1].tokens) == 10
    assert harness.scheduler.cache.pool.num_free == 16  # freed, not cached: its chain had left the index


def test_a_flush_spares_pins_unless_told_otherwise() -> None:
    harness = make()
    run(harness, 1, list(range(8)))
    harness.scheduler.pin("a", list(range(8)), b"", None, harness.now)
    assert harness.scheduler.flush(harness.now, include_active=True).num_freed == 0
    assert harness.scheduler.flush(harness.now, include_pinned=True).num_freed == 2
    assert harness.scheduler.list_pins() == []
    harness.audit()


def test_a_request_that_shares_a_pinned_prefix_needs_no_room_for_it() -> None:
    """H15: what it finds whenever it is let in is no loss to it; to others, and without the cache, it is."""
    harness = make(num_pages=16, max_context_tokens=64, max_pinned_pages=12)
    prompt = list(range(40))
    run(harness, 1, prompt)
    assert harness.scheduler.pin("a", prompt, b"", None, harness.now).pinned_pages == 10
    longest = request(2, [*prompt, 7], max_tokens=23)  # 16 pages, 10 of them the pin's
    assert harness.add(longest).status == AddStatus.ACCEPTED
    harness.run()
    assert len(harness.answers[2].tokens) == 23
    others = [
        request(3, [*prompt, 7], max_tokens=23, salt=b"b"),
        replace(request(3, [*prompt, 7], max_tokens=23), cache_read=False),
        request(3, [1, *prompt], max_tokens=23),
        replace(longest, sequence_id=SequenceId(3), params=SamplingParams(max_tokens=23, prompt_logprobs=0)),
    ]
    for other in others:
        refused = harness.add(other)
        assert (refused.status, refused.needed_pages, refused.total_pages) == (AddStatus.NEVER_FITS, 16, 6)


def test_a_pin_that_a_request_shares_takes_nothing_from_it() -> None:
    """Whether the request waits or runs; one that computed the same pages itself needs them all."""
    for num_turns, has_own in ((0, False), (1, False), (1, True)):
        harness = make(num_pages=16, max_context_tokens=64, max_pinned_pages=12)
        prompt = list(range(40))
        spec = request(2, [*prompt, 7], max_tokens=23)
        if has_own:
            harness.add(replace(spec, cache_write=False))
            harness.turn()
            harness.add(request(1, prompt[:8]))
            harness.turn()
        else:
            run(harness, 1, prompt)
            harness.add(spec)
            for _ in range(num_turns):
                harness.turn()
        pinned = prompt[:8] if has_own else prompt
        status = harness.scheduler.pin("a", pinned, b"", None, harness.now).status
        assert status == (PinStatus.LIMIT if has_own else PinStatus.PINNED)
        harness.run()
        assert len(harness.answers[2].tokens) == 23


def test_a_sample_that_takes_over_a_prompt_shares_its_pinned_pages_in_whatever_room() -> None:
    """H15: behind them stand cached pages, of which it takes as many as there is room for."""
    harness = make(num_pages=16, max_context_tokens=64, max_pinned_pages=12, max_chunk_tokens=1)
    prompt = list(range(40))
    run(harness, 1, prompt)
    harness.scheduler.pin("a", prompt[:16], b"", None, harness.now)
    for number in range(2, 6):  # all need their second page in one step
        harness.add(request(number, [number], max_tokens=7))
    for _ in range(3):
        harness.turn()
    spec = request(6, [*prompt, 7, 8, 9], max_tokens=21)  # 16 pages
    harness.add(replace(spec, sample_count=2, cache_write=False))
    harness.turn()
    assert harness.answers[6].start is not None
    harness.turn()
    assert harness.scheduler.counts().preemptions_total == 1
    harness.run()
    assert [len(harness.answers[number].tokens) for number in range(2, 8)] == [7] * 4 + [21] * 2


# Prefixes that are computed to be pinned.


class Desk:
    """Pins on demand, and the turns of an engine that has nothing else to do."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.outputs: OutputQueue[LinkMessage] = OutputQueue(100)
        self.desk = PinDesk(harness.scheduler, self.outputs)

    def order(self, number: int, name: str, prompt: list[int]) -> None:
        self.desk.obey(Pin(Ticket("s", number), name, array("I", prompt), b"", 0.0), self.harness.now)

    def answers(self) -> dict[int, PinAnswer | CallFailure]:
        """Those of all orders so far, by number, once the engine has no work."""
        scheduler, now = self.harness.scheduler, self.harness.now
        while scheduler.has_work(now):
            if (step := scheduler.schedule(now)) is not None:
                scheduler.commit(step, self.harness.runner.launch(step).result(), now)
            for columns in scheduler.take_outputs().values():
                self.desk.take(columns, now)
        found = self.outputs.take(100)
        self.outputs.close()
        answers = [each for each in found if isinstance(each, PinAnswer | CallFailure)]
        assert len({each.ticket for each in answers}) == len(answers) == len(found), "one answer each"
        return {each.ticket.command_id: each for each in answers}


@pytest.mark.parametrize("later", [[], list(range(50, 58))], ids=["let go", "replaced"])
def test_the_last_order_of_a_name_counts_though_an_older_one_is_still_computed(later: list[int]) -> None:
    desk = Desk(make())
    desk.order(1, "other", list(range(90, 98)))
    desk.order(2, "a", list(range(12)))
    desk.order(3, "a", list(range(12)))  # the same once more: both are answered with it
    desk.order(4, "a", later)
    answers = desk.answers()
    for number in (2, 3):
        failure = answers[number]
        assert isinstance(failure, CallFailure)
        assert (failure.error, failure.reason) == (CallError.CANCELLED, CallReason.CANCELLED_BY_OPERATOR)
    pins = {pin.name: pin.num_tokens for pin in desk.harness.scheduler.list_pins()}
    assert pins == {"other": 8} | ({"a": 8} if later else {})
    assert isinstance(answers[4], PinAnswer)
    assert isinstance(answers[1], PinAnswer)


def test_equal_orders_of_a_name_are_both_answered_with_its_pin() -> None:
    desk = Desk(make())
    for number in (1, 2):
        desk.order(number, "a", list(range(12)))
    assert all(
        isinstance(each, PinAnswer) and each.pins[0].pinned_tokens == 12 for each in desk.answers().values()
    )


def test_a_prefix_that_no_request_can_have_is_refused_as_such() -> None:
    """As a bug of ours it was asked for again and again, and nobody was told what is wrong."""
    desk = Desk(make(num_pages=64, max_context_tokens=32))
    desk.order(1, "a", list(range(32)))
    failure = desk.answers()[1]
    assert isinstance(failure, CallFailure)
    assert (failure.error, failure.reason) == (CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD)
    assert "32 tokens leaves no room for output in a context of 32" in failure.message
