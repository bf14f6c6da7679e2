"""Pieces of prompts beside running sequences: how long each is, who gets what is left of a step."""

import pytest

from tests.toy_scheduler import BOTH, alone, make, request


@BOTH
@pytest.mark.parametrize("cache_write", [True, False])
@pytest.mark.parametrize("sharing", [True, False])
def test_a_prompt_in_chunks_is_computed_once(sharing: bool, cache_write: bool, overlap: bool) -> None:
    """B013, M-19: 4·C + 3 tokens are exactly five pieces, cached or not, and pages held = ceil(len / P)."""
    chunk = 7
    length = 4 * chunk + 3
    harness = make(overlap, num_pages=32, sharing=sharing, max_chunk_tokens=chunk)
    spec = request(1, range(length), max_tokens=3, cache_write=cache_write)
    harness.add(spec)
    pieces = []
    while harness.scheduler.has_work(harness.now):
        step = harness.turn()
        if step is not None and not step.num_decode:
            pieces.append(step.ends[0] - step.starts[0])
            assert harness.scheduler.cache.pool.num_active == -(-step.ends[0] // 4)
    assert pieces == [7, 7, 7, 7, 3]
    assert harness.scheduler.counts().prompt_tokens_computed_total == length
    assert harness.answers[1].tokens == alone(spec)


@BOTH
def test_pieces_of_a_long_prompt_shrink_with_its_context_beside_running_sequences(overlap: bool) -> None:
    """Attention makes late pieces dear: half a step at the start, those who run counted with it, a fifth at
    four times the doubling context.

    Alone the same prompt takes whole steps, and so does beside others a prompt that fits in one.
    """
    settings = {"num_pages": 64, "max_context_tokens": 200, "doubling_context": 16}

    def pieces(num_running: int, num_tokens: int = 130) -> list[int]:
        prompt = range(100, 100 + num_tokens)
        harness = make(overlap, **settings)
        for number in range(num_running):
            harness.add(request(number + 1, [number] * 3, max_tokens=60))
        harness.turn()
        harness.turn()
        harness.add(request(9, prompt, max_tokens=2))
        found = []
        while harness.scheduler.has_work(harness.now):
            step = harness.turn()
            spans = [] if step is None else range(len(step.rows))
            found += [
                step.ends[i] - step.starts[i]
                for i in spans
                if step.sequence_ids[i] == 9 and i >= step.num_decode
            ]
        assert harness.answers[9].tokens == alone(request(9, prompt, max_tokens=2), 200)
        return found

    assert pieces(0) == [64, 64, 2]
    assert pieces(1, 60) == [60]
    beside = pieces(1)
    assert beside[:5] == [31, 21, 15, 12, 10]
    assert beside == sorted(beside, reverse=True)
    assert sum(beside) == 130
    assert pieces(3)[0] == 29
    # A limit of pieces is halved by itself; it does not pay for those who run as well.
    settings["max_chunk_tokens"] = 8
    assert pieces(3)[:3] == [4, 4, 4]


def test_pieces_get_no_shorter_than_a_part_of_the_longest_however_late_they_come() -> None:
    """A step has costs of its own."""
    harness = make(num_pages=160, max_context_tokens=300, doubling_context=1)
    harness.add(request(1, range(3), max_tokens=200))
    harness.turn()
    harness.add(request(2, range(100, 380), max_tokens=2))
    pieces = []
    while not harness.answers[2].tokens:
        step = harness.turn()
        assert step is not None
        pieces.append(step.ends[1] - step.starts[1])
    assert sum(pieces) == 280
    assert pieces[0] > min(pieces[:-1]) == pieces[-2] == 64 // 32


def test_a_long_prompt_goes_on_beside_more_running_sequences_than_half_a_step() -> None:
    """A piece that leaves its prompt unfinished is shorter by their number; something is left of it."""
    harness = make(
        num_pages=400, max_running=50, max_step_tokens=64, max_context_tokens=300, doubling_context=64
    )
    for number in range(1, 41):
        harness.add(request(number, [number], max_tokens=60))
    harness.turn()
    harness.add(request(99, range(100, 200), max_tokens=2))
    for _ in range(3):
        step = harness.turn()
        assert step is not None
        assert step.num_decode == 40
        assert step.ends[40] - step.starts[40] == 64 // 32


def test_a_prompt_in_the_queue_that_goes_after_others_is_left_nothing() -> None:
    """What is kept of a step is for one of higher priority."""
    harness = make(num_pages=64, max_running=3, max_step_tokens=16, max_context_tokens=128)
    for number in (1, 2, 3, 4):
        harness.add(request(number, range(100 * number, 100 * number + 40)))
    harness.turn()
    step = harness.turn()
    assert step is not None
    assert list(step.sequence_ids) == [1, 2, 3]


@BOTH
@pytest.mark.parametrize("chunk", [1, 2, 7, 22])
def test_only_the_last_chunk_samples(chunk: int, overlap: bool) -> None:
    """B064: 3·C + 1 tokens; a token and a log-probability each output token, none from inner chunks."""
    harness = make(overlap, num_pages=32, max_chunk_tokens=chunk, max_context_tokens=80)
    spec = request(1, range(3 * chunk + 1 if chunk < 22 else 22), max_tokens=6, logprobs=0)
    harness.add(spec)
    while harness.scheduler.has_work(harness.now):
        step = harness.turn()
        if step is not None and step.ends[0] < len(spec.prompt_token_ids):
            assert list(step.sampled) == []
    answer = harness.answers[1]
    assert answer.tokens == alone(spec, 80)
    assert len(answer.logprobs) == len(answer.tokens) == 6


def test_a_short_prompt_behind_long_ones_starts_within_a_few_steps() -> None:
    """B040: two long prompts and a running sequence; the short one gets its first piece soon."""
    harness = make(num_pages=400, max_running=8, max_step_tokens=65, max_context_tokens=1500)
    harness.add(request(1, range(4), max_tokens=300))
    harness.turn()
    harness.add(request(2, range(1000, 1900)))
    harness.add(request(3, range(2000, 2900)))
    for _ in range(3):
        harness.turn()
    harness.add(request(4, range(3000, 3004)))
    for _ in range(3):
        harness.turn()
    assert harness.answers[4].tokens
    assert not harness.answers[2].tokens
    assert not harness.answers[3].tokens


@pytest.mark.parametrize("num_long", [1, 3, 8])
def test_however_many_prompts_are_unfinished_one_of_higher_priority_starts_before_them(num_long: int) -> None:
    """B040: each of them takes three quarters of what is left, until nothing is; then it was not let in."""
    harness = make(num_pages=4000, max_running=32, max_step_tokens=256, max_context_tokens=1500)
    for number in range(num_long):
        harness.add(request(number, range(1400 * number, 1400 * number + 1400)))
    for _ in range(3):
        harness.turn()
    harness.add(request(99, range(4), priority=1))
    for _ in range(2):
        harness.turn()
    assert harness.answers[99].tokens
    assert not any(harness.answers[number].tokens for number in range(num_long))


def test_prompts_go_on_behind_one_of_higher_priority_that_does_not_fit() -> None:
    harness = make(num_pages=64, max_running=9, max_step_tokens=16, max_context_tokens=256)
    prompts = {number: range(100 * number, 100 * number + 20) for number in range(1, 6)}
    for number, prompt in prompts.items():
        harness.add(request(number, prompt))
    harness.turn()
    harness.add(request(9, range(900, 1140), priority=1))
    harness.turn()
    assert harness.answers[9].start is None
    while not all(harness.answers[number].end for number in prompts):
        harness.turn()
    harness.run()
    assert len(harness.answers[9].tokens) == 4


def test_tokens_that_nobody_else_can_use_go_to_the_first_prompt() -> None:
    harness = make(num_pages=64, max_step_tokens=41, max_context_tokens=200, max_running=2)
    harness.add(request(1, range(100)))
    harness.add(request(2, range(500, 503)))
    step = harness.launch()
    assert step is not None
    assert step.num_tokens == 41
    assert list(step.ends) == [38, 3]
    harness.settle()


def test_what_is_left_of_a_step_is_spent_once() -> None:
    """Two prompts that are not finished, and one that waits for a row: both could use what is left."""
    harness = make(num_pages=100, max_running=2, max_step_tokens=16, max_context_tokens=100)
    for number in (1, 2, 3):
        harness.add(request(number, range(100 * number, 100 * number + 60)))
    step = harness.turn()
    assert step is not None
    assert [end - start for start, end in zip(step.starts, step.ends, strict=True)] == [13, 3]


def test_running_sequences_go_on_while_a_prompt_is_computed() -> None:
    """Open streams never stall behind a long prompt."""
    harness = make(num_pages=64, max_step_tokens=16, max_context_tokens=300, max_running=2)
    harness.add(request(1, range(4), max_tokens=50))
    harness.turn()
    harness.add(request(2, range(1000, 1100)))
    for count in range(2, 8):
        harness.turn()
        assert len(harness.answers[1].tokens) == count
