"""What the spans of a generation say, however far it came."""

from collections.abc import Iterator

import pytest

from kvatlas.v1 import generation_pb2 as pb
from service.errors import queue_timeout
from service.handlers.spans import Ending, Phase, ending_of
from service.request import FinishCode, KvBill, PrefixCounts, SequenceEnd, SequenceStart
from tests.run_bench import PROMPT, Bench, FakeLink, Loop, running_loop

TEXT = pb.GenerationSpec(text="x")


@pytest.fixture
def loop() -> Iterator[Loop]:
    yield from running_loop()


def ending(bench: Bench, outcome: str = "completed") -> Ending:
    return ending_of(
        TEXT, bench.request, bench.run, bench.run.account, model="m", outcome=outcome, failure=None, now=9.0
    )


def test_phases_follow_one_another_and_the_last_one_ends_with_the_request(loop: Loop) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link)
    account = bench.run.account
    account.received = 1.0
    assert ending(bench, "cancelled").phases == (Phase("queue", 1.0, 9.0),)
    bench.run.submit()
    bench.inbox.started(
        SequenceStart(link.sent[0].sequence_id, PrefixCounts(4, 5, 1, 0), 1, 0, resumed=False)
    )
    bench.run.settle()
    account.admitted_at = 2.0
    prefill = {"kvatlas.cached_tokens": 4, "kvatlas.computed_tokens": len(PROMPT) - 4}
    assert ending(bench).phases == (Phase("queue", 1.0, 2.0), Phase("prefill", 2.0, 9.0, prefill))
    account.first_token_at, account.last_token_at = 3.0, 5.0
    bench.choices[0].num_tokens = 7
    assert ending(bench).phases == (
        Phase("queue", 1.0, 2.0),
        Phase("prefill", 2.0, 3.0, prefill),
        Phase("decode", 3.0, 5.0, {"gen_ai.usage.output_tokens": 7}),
    )


def test_what_was_not_looked_up_was_computed(loop: Loop) -> None:
    bench = Bench(loop, FakeLink("a"))
    bench.run.account.admitted_at = 2.0
    (_, prefill) = ending(bench).phases
    assert prefill.attributes == {"kvatlas.cached_tokens": 0, "kvatlas.computed_tokens": len(PROMPT)}
    assert "kvatlas.prefix.hit_tokens" not in ending(bench).attributes


def test_results_are_the_runs_own(loop: Loop) -> None:
    link = FakeLink("a")
    bench = Bench(loop, link, samples=2)
    bench.run.submit()
    first = link.sent[0].sequence_id
    start = SequenceStart(first, PrefixCounts(4, 3, 2, 1), 1, 0, resumed=False)
    bench.inbox.started(start)
    link.step((first, 65), (first + 1, 66))
    bill = KvBill(page_seconds=1.5, preemptions=2)
    bench.choices[0].box.finish(SequenceEnd(first, FinishCode.EOS, bill=bill))
    bench.run.take()
    told = ending(bench).attributes
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ["eos"],
        "kvatlas.worker": "a",
        "kvatlas.resumes": 0,
        "kvatlas.preemptions": 2,
        "kvatlas.page_seconds": 1.5,
        "kvatlas.prefix.hit_tokens": 4,
        "kvatlas.prefix.miss_cold_tokens": 3,
        "kvatlas.prefix.miss_evicted_tokens": 2,
        "kvatlas.prefix.unaligned_tokens": 1,
    }
    assert {key: told.get(key) for key in wanted} == wanted
    assert "error.type" not in told


def test_a_request_that_never_began_says_why(loop: Loop) -> None:
    account = Bench(loop).run.account
    spec = pb.GenerationSpec(chat=pb.ChatPrompt())
    failure = queue_timeout(5)
    end = ending_of(spec, None, None, account, model="", outcome="rejected", failure=failure, now=9.0)
    assert (end.name, end.at, end.error) == ("chat", 9.0, "QUEUE_TIMEOUT")
    assert end.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvatlas",
        "gen_ai.request.model": "",
        "kvatlas.outcome": "rejected",
        "error.type": "QUEUE_TIMEOUT",
    }
    account.admitted_at = 2.0
    end = ending_of(spec, None, None, account, model="", outcome="failed", failure=failure, now=9.0)
    assert end.phases[1].attributes == {"kvatlas.cached_tokens": 0, "kvatlas.computed_tokens": 0}
