"""The real service and the real worker, whose device is made of lists: what only the two together show.

What is looked at while it runs is held (`hold` of conftest.py).
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvatlas.v1 import cache_pb2, cache_pb2_grpc, generation_pb2_grpc
from kvatlas.v1 import generation_pb2 as pb
from service.fleet import prefix_hint
from service.handlers import tokens as tokens_module
from service.testing import Refusal, RunningService, running_service

ROOT = Path(__file__).resolve().parents[2]
PAGE_SIZE = 16
CALL_SECONDS = 120.0  # ends a call that hangs


class WorkerProcess:
    """`python -m worker --runner fake` at one address; `start` again after a kill is a new life."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.address = f"ipc://{folder}/engine"
        self._folder = folder
        self._flags = flags
        self._log = (folder / "worker.log").open("ab")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "worker", "--runner", "fake", "--model", "random:tiny"]
        command += ["--engine-address", self.address, "--pages-address", f"ipc://{self._folder}/pages"]
        command += ["--metrics-port", "-1", "--page-size", str(PAGE_SIZE), "--max-batch-tokens", "256"]
        command += self._flags
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
        self.process = subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        self.kill()
        self._log.close()


class Stack:
    """Both, and stubs."""

    def __init__(self, running: RunningService, worker: WorkerProcess, channel: grpc.Channel) -> None:
        self.running = running
        self.worker = worker
        self.generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self.cache = cache_pb2_grpc.CacheServiceStub(channel)

    def active_pages(self) -> int:
        """Pages that sequences hold, as the mirror shows them."""
        response = self.cache.GetPagePool(cache_pb2.GetPagePoolRequest(), timeout=10)
        return int(response.stats.active_pages)

    def generate(self, spec: pb.GenerationSpec) -> pb.GenerateResponse:
        response: pb.GenerateResponse = self.generation.Generate(
            pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS
        )
        return response


MakeStack = Callable[..., Stack]


@pytest.fixture(scope="module")
def make_stack(tmp_path_factory: pytest.TempPathFactory, wait_until: Any) -> Iterator[MakeStack]:
    """Stacks of a test's own: `make_stack("--num-pages", "8", resume_seconds=2.0)`."""
    from contextlib import ExitStack

    with ExitStack() as cleanup:

        def make(*flags: str, **settings: Any) -> Stack:
            folder = tmp_path_factory.mktemp("stack")
            worker = WorkerProcess(folder, *flags)
            cleanup.callback(worker.close)
            worker.start()
            running = cleanup.enter_context(
                running_service(folder, num_workers=0, ready=False, workers=(worker.address,), **settings)
            )
            wait_until(lambda: running.service.backstage.pool.usable, "the worker")
            return Stack(running, worker, cleanup.enter_context(grpc.insecure_channel(running.address)))

        yield make


@pytest.fixture(scope="module")
def stack(make_stack: MakeStack) -> Stack:
    return make_stack("--num-pages", "200", "--fake-step-ms", "2")


@pytest.fixture(scope="module")
def narrow(make_stack: MakeStack, make_hold: Any) -> Stack:
    """One request runs, one waits, and both go on until they are cancelled."""
    flags = ("--num-pages", "50", "--max-running", "1", "--max-queued", "1")
    return make_stack(*flags, *make_hold().flags)


def spec_of(text: str, max_tokens: int | None = 32, **more: Any) -> pb.GenerationSpec:
    spec = pb.GenerationSpec(text=text, sampling=pb.SamplingParams(temperature=0), **more)
    spec.stop.ignore_eos = True
    if max_tokens is not None:
        spec.stop.max_tokens = max_tokens
    return spec


def ids_of(spec: pb.GenerationSpec) -> pb.GenerationSpec:
    spec.output.format = pb.OUTPUT_FORMAT_TOKEN_IDS
    return spec


def test_stream_and_unary_give_the_same_tokens(stack: Stack) -> None:
    spec = spec_of("the quick brown fox", 60)
    whole = stack.generate(spec).choices[0]
    stream = stack.generation.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=CALL_SECONDS)
    assert "".join(message.delta.text for message in stream) == whole.text
    assert whole.finish_reason == pb.FINISH_REASON_MAX_TOKENS


def test_the_second_time_whole_pages_of_the_prompt_are_found(stack: Stack) -> None:
    text = "a prompt that nobody asked before " * 4
    first, second = (stack.generate(spec_of(text, 4)) for _ in range(2))
    assert first.usage.prefix.hit_tokens == 0
    assert second.usage.prefix.hit_tokens == (len(text) - 1) // PAGE_SIZE * PAGE_SIZE
    assert second.usage.kv.reused_pages == second.usage.prefix.hit_tokens // PAGE_SIZE
    for usage in (first.usage, second.usage):
        parts = usage.prefix
        total = parts.hit_tokens + parts.miss_cold_tokens + parts.miss_evicted_tokens + parts.unaligned_tokens
        assert total == usage.prompt_tokens == len(text)
    assert first.choices[0].text == second.choices[0].text


def test_tokenize_tells_how_much_of_a_prompt_is_cached(stack: Stack, wait_until: Any) -> None:
    text = "another prompt, to be found by its fingerprint " * 3
    request = pb.TokenizeRequest(text=text)
    assert stack.generation.Tokenize(request, timeout=10).cached_tokens == 0
    stack.generate(spec_of(text, 2))
    expected = (len(text) - 1) // PAGE_SIZE * PAGE_SIZE
    wait_until(
        lambda: stack.generation.Tokenize(request, timeout=10).cached_tokens == expected, "the mirror to know"
    )


def test_a_long_text_is_looked_up_beside_the_loop(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    """A microsecond a page: 2 MiB of text in pages of one token held every stream up for seconds."""
    kept = stack.running.service._mirrors.kept
    wait_until(lambda: all("fingerprints" in each.mirror.planes for each in kept), "the map")
    threads: list[str] = []

    def looking(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return prefix_hint.page_fingerprints(*arguments)

    monkeypatch.setattr(tokens_module, "page_fingerprints", looking)
    for text in ("x" * 100_000, "x"):
        stack.generation.Tokenize(pb.TokenizeRequest(text=text), timeout=CALL_SECONDS)
    assert threads[0].startswith("text_")
    assert len(threads) == 2


def test_salts_do_not_share_pages(stack: Stack) -> None:
    text = "the same text under two salts, twice " * 3
    hits = [
        stack.generate(spec_of(text, 2, cache=pb.CacheOptions(salt=salt))).usage.prefix.hit_tokens
        for salt in ("one", "two", "one", "")
    ]
    assert hits[0] == hits[1] == hits[3] == 0
    assert hits[2] > 0


def test_samples_share_the_prompts_pages(stack: Stack) -> None:
    text = "x" * 100
    response = stack.generate(spec_of(text, 8, cache=pb.CacheOptions(read=False)))
    several = spec_of(text, 8, cache=pb.CacheOptions(read=False))
    several.sampling.n = 4
    shared = stack.generate(several)
    assert len(shared.choices) == 4
    assert shared.usage.kv.peak_pages < 4 * response.usage.kv.peak_pages
    assert shared.usage.kv.copied_pages == 3  # the part-filled last page; the rest stays shared


@pytest.mark.parametrize("phase", ["queue", "decode"])
def test_a_cancelled_call_gives_its_pages_back(narrow: Stack, wait_until: Any, hold: Any, phase: str) -> None:
    """H10, B105: seen from outside, by the page map."""
    stack = narrow
    stream = stack.generation.StreamGenerate
    first = stream(pb.StreamGenerateRequest(spec=spec_of("abc", hold.tokens)), timeout=CALL_SECONDS)
    assert next(first).WhichOneof("event") == "started"
    wait_until(lambda: stack.active_pages() > 0, "pages in use")
    if phase == "queue":
        second = stream(pb.StreamGenerateRequest(spec=spec_of("def", hold.tokens)), timeout=CALL_SECONDS)
        live = stack.running.service.backstage.live
        wait_until(lambda: live.waiting() == 1 and not live.untaken(), "the second in the queue")
        second.cancel()
        wait_until(lambda: len(live) == 1, "the end of the second")
    first.cancel()
    wait_until(lambda: stack.active_pages() == 0, "the pages to be free")
    wait_until(lambda: stack.running.is_idle, "an idle service")


def test_max_tokens_unset_fits_the_pool_whatever_the_prompt(make_stack: MakeStack) -> None:
    """So it never causes EXCEEDS_PAGE_POOL, and a prompt is never cut."""
    stack = make_stack("--num-pages", "12", "--max-running", "4")
    for length, samples in ((1, 1), (15, 2), (16, 1), (17, 4), (100, 1), (100, 3), (180, 1)):
        spec = spec_of("y" * length, None)
        spec.sampling.n = samples
        response = stack.generate(spec)
        assert response.usage.prompt_tokens == length
        for choice in response.choices:
            assert choice.finish_reason == pb.FINISH_REASON_CONTEXT_LENGTH
        assert response.usage.completion_tokens >= samples
        assert length + response.usage.completion_tokens // samples <= 12 * PAGE_SIZE


def test_what_can_never_fit_is_refused_with_both_numbers(stack: Stack, make_stack: MakeStack) -> None:
    """H7: an answer, not a wait."""
    small = make_stack("--num-pages", "12", "--max-running", "4")
    with pytest.raises(grpc.RpcError) as raised:
        small.generate(spec_of("y" * 300, 10))
    assert Refusal.of(raised.value).reason == "PROMPT_TOO_LONG"
    response = stack.generate(spec_of("y" * 300, 3))
    assert response.usage.completion_tokens == 3


def test_a_full_queue_refuses_at_once(narrow: Stack, wait_until: Any, hold: Any) -> None:
    stack = narrow
    stream = stack.generation.StreamGenerate
    request = pb.StreamGenerateRequest(spec=spec_of("abc", hold.tokens))
    first = stream(request, timeout=CALL_SECONDS)
    next(first)
    second = stream(request, timeout=CALL_SECONDS)
    live = stack.running.service.backstage.live
    wait_until(lambda: live.waiting() == 1 and not live.untaken(), "the second in the queue")
    with pytest.raises(grpc.RpcError) as raised:
        stack.generate(spec_of("abc", 5))
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.reason) == ("UNAVAILABLE", "QUEUE_FULL")
    first.cancel()
    second.cancel()
    wait_until(lambda: stack.running.is_idle, "an idle service")


def test_a_queue_timeout_ends_only_its_own_call(narrow: Stack, wait_until: Any, hold: Any) -> None:
    stack = narrow
    request = pb.StreamGenerateRequest(spec=spec_of("abc", hold.tokens))
    first = stack.generation.StreamGenerate(request, timeout=CALL_SECONDS)
    next(first)
    spec = spec_of("abc", 5)
    spec.scheduling.queue_timeout.FromMilliseconds(200)
    with pytest.raises(grpc.RpcError) as raised:
        stack.generate(spec)
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_TIMEOUT")
    assert next(first).delta.token_count >= 1
    first.cancel()
    wait_until(lambda: stack.running.is_idle, "an idle service")


def test_a_killed_worker_costs_no_request_and_changes_no_token(
    make_stack: MakeStack, wait_until: Any, hold: Any
) -> None:
    """SIGKILL with four running and four queued; its launcher starts it again."""
    stack = make_stack("--num-pages", "200", "--max-running", "4", *hold.flags, resume_seconds=CALL_SECONDS)
    specs = [ids_of(spec_of(f"prompt number {number}", hold.tokens)) for number in range(8)]
    hold.off()
    alone = [list(stack.generate(spec).choices[0].token_ids) for spec in specs]
    hold.on()
    generate = stack.generation.Generate.future
    calls = [generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS) for spec in specs]
    live = stack.running.service.backstage.live
    wait_until(lambda: len(live) == 8 and live.waiting() == 4 and not live.untaken(), "four and four")
    stack.worker.kill()
    hold.off()
    stack.worker.start()
    responses = [call.result() for call in calls]
    assert [list(response.choices[0].token_ids) for response in responses] == alone
    assert sum(response.usage.resumes for response in responses) == 4
    wait_until(lambda: stack.active_pages() == 0, "the pages to be free")


def test_a_worker_that_stays_away_ends_every_call_by_the_table(
    make_stack: MakeStack, wait_until: Any, hold: Any
) -> None:
    """Once the patience is over: no call waits for its own deadline."""
    stack = make_stack("--num-pages", "100", "--max-running", "2", *hold.flags, resume_seconds=1.0)

    def stream(text: str) -> Any:
        request = pb.StreamGenerateRequest(spec=spec_of(text, hold.tokens))
        return stack.generation.StreamGenerate(request, timeout=CALL_SECONDS)

    running = [stream(f"abc{number}") for number in range(2)]
    for call in running:
        assert next(call).WhichOneof("event") == "started"
    queued = [stream(f"def{number}") for number in range(2)]
    live = stack.running.service.backstage.live
    wait_until(lambda: len(live) == 4 and not live.untaken(), "all on the worker")
    stack.worker.kill()
    for call, code in [*((call, "ABORTED") for call in running), *((call, "UNAVAILABLE") for call in queued)]:
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        refusal = Refusal.of(raised.value)
        assert (refusal.code, refusal.reason) == (code, "WORKER_LOST")


@pytest.mark.slow
def test_a_stopped_worker_is_lost_and_no_token_comes_twice_when_it_goes_on(
    make_stack: MakeStack, wait_until: Any, hold: Any
) -> None:
    """SIGSTOP, then SIGCONT: the old run's tokens match nothing any more."""
    stack = make_stack("--num-pages", "100", "--max-running", "4", *hold.flags, resume_seconds=CALL_SECONDS)
    spec = spec_of("a prompt to be interrupted", hold.tokens)
    hold.off()
    alone = stack.generate(spec).choices[0].text
    hold.on()
    call = stack.generation.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=CALL_SECONDS)
    messages = [next(call) for _ in range(10)]
    stack.worker.signal(signal.SIGSTOP)
    pool = stack.running.service.backstage.pool
    wait_until(lambda: not pool.usable, "the worker to be taken for lost")
    hold.off()
    stack.worker.signal(signal.SIGCONT)
    messages += list(call)
    deltas = [message.delta for message in messages if message.WhichOneof("event") == "delta"]
    assert "".join(delta.text for delta in deltas) == alone
    total = 0
    for delta in deltas:
        assert delta.token_offset == total
        total += delta.token_count
    assert total == hold.tokens
    assert messages[-1].summary.usage.resumes == 1
    wait_until(lambda: stack.active_pages() == 0, "the pages to be free")


@pytest.mark.slow
def test_a_worker_that_drains_hands_over_and_its_successor_goes_on(
    make_stack: MakeStack, wait_until: Any, hold: Any
) -> None:
    """SIGTERM with a short grace: DRAINED is no end for the client."""
    flags = ("--num-pages", "100", "--max-running", "4", "--drain-grace", "0.2")
    stack = make_stack(*flags, *hold.flags, resume_seconds=CALL_SECONDS)
    spec = ids_of(spec_of("handed over", hold.tokens))
    hold.off()
    alone = list(stack.generate(spec).choices[0].token_ids)
    wait_until(lambda: stack.active_pages() == 0, "what is told of that answer's pages to be over")
    hold.on()
    pending = stack.generation.Generate.future(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
    wait_until(lambda: stack.active_pages() > 0, "pages in use")
    stack.worker.signal(signal.SIGTERM)
    assert stack.worker.process is not None
    assert stack.worker.process.wait(CALL_SECONDS) == 0
    hold.off()
    stack.worker.start()
    response = pending.result()
    assert list(response.choices[0].token_ids) == alone
    assert response.usage.resumes == 1
