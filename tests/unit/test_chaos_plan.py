"""The chaos run's schedule is its seed's, and its judgement can say no."""

from collections import Counter

import pytest

from benchmarks import chaos_plan
from benchmarks.chaos import Outcome
from benchmarks.chaos_plan import Kind, Reader
from benchmarks.chaos_streams import Answer, Tally


def test_the_same_seed_gives_the_same_disturbances_requests_and_streams() -> None:
    def all_of(seed: int) -> object:
        source = chaos_plan.streams(seed, 10)
        return (
            chaos_plan.disturbances(seed, 30, list(Kind)),
            chaos_plan.requests(seed, 10),
            [source.take() for _ in range(50)],
        )

    assert all_of(4) == all_of(4)
    assert all_of(4) != all_of(5)


def test_every_kind_comes_once_before_any_comes_again() -> None:
    kinds = list(Kind)
    plan = chaos_plan.disturbances(9, 3 * len(kinds), kinds)
    for begin in range(0, len(plan), len(kinds)):
        assert {each.kind for each in plan[begin : begin + len(kinds)]} == set(kinds)
    assert {each.target for each in plan} == {0, 1}


def test_requests_are_greedy_and_seeded_and_streams_are_read_in_every_way() -> None:
    requests = chaos_plan.requests(1, 96)
    assert Counter(request.temperature == 0 for request in requests)[True] == 48
    assert any(request.samples > 1 for request in requests)
    assert any(request.stop for request in requests)
    source = chaos_plan.streams(1, 96)
    assert {source.take().reader for _ in range(200)} == set(Reader)


def answer(ids: list[int], text: str, *, is_whole: bool = True) -> Answer:
    found = Answer(token_ids={0: ids}, texts={0: [text]}, is_whole=is_whole)
    if is_whole:
        found.ends[0] = ("max_tokens", None, len(ids))
    return found


RIGHT = answer([1, 2, 3], "abc")


def test_an_answer_that_is_the_same_or_the_beginning_of_it_is_right() -> None:
    assert answer([1, 2, 3], "abc").fault_against(RIGHT) == ""
    assert answer([1, 2], "ab", is_whole=False).fault_against(RIGHT) == ""
    assert Answer().fault_against(RIGHT) == ""


@pytest.mark.parametrize(
    "wrong",
    [
        answer([1, 9, 3], "abc"),
        answer([1, 9], "ab", is_whole=False),
        answer([1, 2, 3, 4], "abc", is_whole=False),
        answer([1, 2], "ab"),
        answer([1, 2, 3], "abd"),
        answer([1, 2, 3], "ab"),
        answer([1, 2, 3], "abcd", is_whole=False),
    ],
)
def test_an_answer_with_another_missing_or_surplus_token_or_text_is_wrong(wrong: Answer) -> None:
    assert wrong.fault_against(RIGHT) != ""


def test_a_run_with_a_failed_stream_a_wrong_answer_or_a_held_page_is_no_good_run() -> None:
    def outcome(**more: object) -> Outcome:
        tally = Tally(opened=2, ended=Counter(whole=1, left=1))
        found = Outcome(tally, leaked_pages={"worker-0": 0})
        for name, value in more.items():
            setattr(tally if hasattr(tally, name) else found, name, value)
        return found

    assert outcome().faults() == []
    assert outcome(opened=2000, ended=Counter(whole=1998, WORKER_LOST=2)).faults() == []
    for bad in (
        {"ended": Counter(whole=1, WORKER_LOST=1)},
        {"opened": 2000, "ended": Counter(whole=1997, WORKER_LOST=3)},
        {"opened": 2000, "ended": Counter(whole=1999, INTERNAL=1)},
        {"ended": Counter(whole=1)},
        {"opened": 0, "ended": Counter()},
        {"ended": Counter(left=2)},
        {"mismatches": 1},
        {"leaked_pages": {"worker-0": 3}},
        {"leaked_pages": {"worker-0": -1}},
        {"violations": {"worker-1": 1}},
        {"exit_codes": Counter({0: 3, 1: 1})},
    ):
        assert outcome(**bad).faults(), bad
