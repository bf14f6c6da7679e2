"""What goes to services: each entry beside its own, whatever stood in the columns before, and when."""

from array import array

from tests.toy_scheduler import make, request
from worker.ids import SequenceId
from worker.scheduling.decode_batch import SourceGroup
from worker.scheduling.outbox import Outbox
from worker.scheduling.output import NO_TOKEN, FinishCode, OutputColumns, SequenceEnd
from worker.scheduling.step import TokenLogprob


def score(token_id: int) -> TokenLogprob:
    return TokenLogprob(-token_id / 10, token_id)


def add(outbox: Outbox, *groups: SourceGroup, tokens: list[int]) -> None:
    """A step's tokens, with scores of the even ones."""
    scores = {at: score(token) for at, token in enumerate(tokens) if token % 2 == 0}
    outbox.add_tokens(list(groups), tokens, bytearray(len(tokens)), scores)


def told(columns: OutputColumns) -> list[tuple[int, int, TokenLogprob | None]]:
    entries = zip(columns.sequence_ids, columns.token_ids, strict=True)
    return [(who, token, columns.logprobs.get(at)) for at, (who, token) in enumerate(entries)]


def test_scores_stand_beside_their_tokens_behind_what_was_not_taken_yet() -> None:
    """Of one service or several, of a step or of a first token."""
    outbox = Outbox()
    first = SourceGroup("a", [0, 2], array("Q", (1, 3)))
    second = SourceGroup("b", [1, 3], array("Q", (2, 4)))
    add(outbox, first, second, tokens=[10, 20, 31, 40])
    outbox.add_token("a", SequenceId(5), 50, 0, score(50))
    outbox.add_token("b", SequenceId(6), 61, 0, None)
    add(outbox, first, second, tokens=[11, 22, 32, 43])
    add(outbox, SourceGroup("a", None, array("Q", (1, 3))), tokens=[12, 33])
    found = {source: told(columns) for source, columns in outbox.take().items()}
    assert found == {
        "a": [
            (1, 10, score(10)),
            (3, 31, None),
            (5, 50, score(50)),
            (1, 11, None),
            (3, 32, score(32)),
            (1, 12, score(12)),
            (3, 33, None),
        ],
        "b": [(2, 20, score(20)), (4, 40, score(40)), (6, 61, None), (2, 22, score(22)), (4, 43, None)],
    }
    assert outbox.take() == {}


def test_what_is_of_a_service_that_is_left_out_waits_for_the_next_take() -> None:
    outbox = Outbox()
    end = SequenceEnd(SequenceId(1), FinishCode.ABORTED, 0, None, None, "")
    outbox.add_end("a", end, with_token=False)
    outbox.add_token("b", SequenceId(2), 7, 0, None)
    assert outbox.take(leaving="a").keys() == {"b"}
    left = outbox.take(leaving="b")
    assert told(left["a"]) == [(1, NO_TOKEN, None)]
    assert (list(left["a"].finish_codes), left["a"].ends) == ([FinishCode.ABORTED], [end])
    assert outbox.take(leaving="a") == {}


def test_a_first_token_goes_out_before_its_pages_are_sealed_unless_more_belongs_before_it() -> None:
    """Scores of the prompt do; samples wait for its pages; one that ends gives its pages back."""
    harness = make(num_pages=64)
    scheduler = harness.scheduler
    for number, more in (
        (1, {}),
        (2, {"prompt_logprobs": 0}),
        (3, {"sample_count": 2}),
        (5, {"max_tokens": 1}),
    ):
        scheduler.add(request(number, range(100 * number, 100 * number + 9), **more), 1.0)  # type: ignore[arg-type]
    step = scheduler.schedule(1.0)
    assert step is not None
    scheduler.take_outputs()
    early: list[int] = []

    def take() -> None:
        assert scheduler.cache.lookup(array("I", range(100, 109)), b"", 2).pages == []
        for columns in scheduler.take_outputs().values():
            early.extend(columns.sequence_ids)

    scheduler.commit(step, harness.runner.launch(step).result(), 1.0, take)
    assert early == [1]
    (late,) = scheduler.take_outputs().values()
    assert list(late.sequence_ids) == [2, 3, 5]
    assert [sequence_id for sequence_id, _ in late.prompt_logprobs] == [2]
    assert len(scheduler.cache.lookup(array("I", range(100, 109)), b"", 2).pages) == 2
