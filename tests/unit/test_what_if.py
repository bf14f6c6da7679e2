"""What-if: predictions against really running the setting, and what it is honest about."""

import json
import random
import re
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from worker.execution.testing import small_config
from worker.ids import SequenceId
from worker.readers.recorder import RecordingOptions
from worker.readers.samples import LoggedEnd, LoggedRequest
from worker.scheduling.output import FinishCode
from worker.scheduling.step import Step
from worker.trace import mooncake, what_if
from worker.trace.building import trace_requests
from worker.trace.counts import Counts, Setting
from worker.trace.loading import Loaded, load
from worker.trace.marks import Marks
from worker.trace.mooncake import BadTrace
from worker.trace.prepared import prepare
from worker.trace.simulation import Cancelled, Simulation
from worker.trace.step_time import StepTime, fit
from worker.trace.testing import RecordedWorker, Turn, conversations, hit_ratio, run_turns
from worker.trace.workload import (
    CachedPage,
    Limits,
    Output,
    Trace,
    TraceRequest,
    output_units,
    prompt_units,
)

PAGES, PAGE_SIZE = 160, 16
TURNS = conversations(3, seconds=12, rate=22)


def seconds_of(step: Step) -> float:
    """4 ms, 20 us a prompt token, 30 us a sequence."""
    computed = sum(step.ends) - sum(step.starts)
    return 0.004 + 20e-6 * (computed - step.num_decode) + 30e-6 * step.num_decode


def worker_of(folder: Path, num_pages: int, page_size: int, policy: str = "lru") -> RecordedWorker:
    config = small_config(
        num_pages, page_size, 32, 512, 512, event_capacity=65536, eviction_policy=policy, watermark_pages=None
    )
    return RecordedWorker(config, folder, step_seconds=seconds_of)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A recording of the whole life of a worker."""
    folder = tmp_path_factory.mktemp("recordings")
    worker = worker_of(folder, PAGES, PAGE_SIZE)
    worker.recorder.start_recording(RecordingOptions(max_seconds=1e9, max_bytes=1 << 30))
    run_turns(worker, TURNS)
    info = worker.recorder.stop_recording("")
    found = load(folder / f"{info.recording_id}.kvrec")
    assert found.observed.hit_ratio == hit_ratio(worker)
    return found


def predict(loaded: Loaded, setting: Setting, resolution: int = 1) -> Counts:
    assert loaded.step_time is not None
    return Simulation(loaded.trace, setting, loaded.step_time, resolution=resolution).run()


@pytest.mark.parametrize(
    ("num_pages", "page_size", "policy"),
    [
        (PAGES, 16, "lru"),
        (PAGES // 2, 16, "lru"),
        (PAGES * 2, 16, "lru"),
        (PAGES // 2, 32, "lru"),
        (PAGES * 2, 8, "lru"),
        (PAGES // 2, 16, "fifo"),
        (PAGES // 2, 16, "lfu"),
        (PAGES // 2, 16, "cost"),
    ],
)
def test_predictions_are_what_running_it_gives(
    loaded: Loaded, tmp_path: Path, num_pages: int, page_size: int, policy: str
) -> None:
    """Hit rate within 2 percentage points, token by token within 0.2; preemptions alike."""
    really = worker_of(tmp_path, num_pages, page_size, policy)
    run_turns(really, TURNS)
    counts = really.scheduler.counts()
    exact = predict(loaded, Setting(num_pages, page_size, policy))
    assert exact.hit_ratio == pytest.approx(hit_ratio(really), abs=0.002)
    assert exact.num_requests == len(TURNS)
    assert exact.evictions == pytest.approx(counts.capacity_evictions_total, rel=0.02, abs=5)
    coarse = predict(loaded, Setting(num_pages, page_size, policy), resolution=8)
    assert coarse.hit_ratio == pytest.approx(hit_ratio(really), abs=0.02)
    assert coarse.looked_up_tokens == exact.looked_up_tokens == sum(len(turn.prompt) for turn in TURNS)
    assert coarse.num_steps < exact.num_steps / 2
    if num_pages == PAGES // 2:
        assert counts.preemptions_total == 0 or exact.preemptions > 0
        assert exact.preemptions == pytest.approx(counts.preemptions_total, rel=0.2, abs=3)


def test_a_pool_that_is_far_too_small_preempts_as_predicted(tmp_path: Path) -> None:
    draw = random.Random(4)
    turns = []
    for at in range(60):
        prompt, answer = ([draw.randrange(500) for _ in range(count)] for count in (30, 90))
        turns.append(Turn(at * 0.01, prompt, answer))
    worker = worker_of(tmp_path, 400, 16)
    worker.recorder.start_recording(RecordingOptions(max_seconds=1e9))
    run_turns(worker, turns)
    info = worker.recorder.stop_recording("")
    assert worker.scheduler.counts().preemptions_total == 0, "there was room when it was recorded"
    loaded = load(tmp_path / f"{info.recording_id}.kvrec")
    really = worker_of(tmp_path, 60, 16)
    run_turns(really, turns)
    measured = really.scheduler.counts().preemptions_total
    predicted = predict(loaded, Setting(60, 16, "lru"))
    assert measured > 20
    assert predicted.preemptions == pytest.approx(measured, rel=0.1)
    computed_again = really.scheduler.counts().recomputed_tokens_total
    assert 0 < computed_again < really.scheduler.counts().preempted_tokens_total, "some are found again"
    assert predicted.recomputed_tokens == pytest.approx(computed_again, rel=0.1)
    assert predicted.mean_queue_seconds > 0.1


def test_a_recording_that_begins_with_a_warm_cache_starts_from_it(tmp_path: Path) -> None:
    worker = worker_of(tmp_path, PAGES, PAGE_SIZE)
    half = len(TURNS) // 2
    run_turns(worker, TURNS[:half])
    worker.recorder.start_recording(RecordingOptions(max_seconds=1e9))
    run_turns(worker, TURNS[half:])
    info = worker.recorder.stop_recording("")
    loaded = load(tmp_path / f"{info.recording_id}.kvrec")
    assert len(loaded.trace.cached) > PAGES // 2
    today = Setting(PAGES, PAGE_SIZE, "lru")
    warm = predict(loaded, today).hit_ratio
    assert warm == pytest.approx(loaded.observed.hit_ratio, abs=0.01)
    assert loaded.step_time is not None
    cold = Trace(**{name: getattr(loaded.trace, name) for name in Trace.__slots__} | {"cached": ()})
    assert Simulation(cold, today, loaded.step_time).run().hit_ratio < warm - 0.005
    notes = what_if.notes_of(loaded.trace, [today, Setting(PAGES * 2, PAGE_SIZE, "lru")], loaded)
    assert "warm" in notes[0]


def test_more_memory_never_finds_less(loaded: Loaded) -> None:
    ratios = [predict(loaded, Setting(pages, 16, "lru"), 8).hit_ratio for pages in (40, 80, 160, 320, 640)]
    assert ratios == sorted(ratios)
    assert ratios[0] < ratios[-1] - 0.1


def trace(requests: Sequence[TraceRequest], **changes: object) -> Trace:
    values: dict[str, object] = {
        "requests": requests,
        "granularity": 8,
        "page_size": 16,
        "num_pages": 64,
        "policy": "lru",
        "limits": Limits(8, 256, 512),
        "seconds": 100.0,
    }
    return Trace(**values | changes)  # type: ignore[arg-type]


def request(arrival: float, num_prompt: int, *outputs: int, keys: Sequence[int] = ()) -> TraceRequest:
    found = tuple(Output(count, array("Q"), arrival + 1.0) for count in outputs)
    return TraceRequest(arrival, num_prompt, max(1, *outputs), array("Q", keys), found)


STEP = StepTime(0.01)


def test_keys_decide_what_is_shared() -> None:
    same = trace([request(0, 40, 4, keys=range(1, 6)), request(50, 40, 4, keys=[1, 2, 3, 9, 10])])
    counts = Simulation(same, Setting(64, 16, "lru"), STEP).run()
    assert (counts.hit_tokens, counts.miss_cold_tokens, counts.unaligned_tokens) == (16, 48, 16)
    finer = Simulation(same, Setting(128, 8, "lru"), STEP).run()
    assert finer.hit_tokens == 24


def test_marks_are_the_same_as_far_as_keys_are_and_nowhere_else() -> None:
    requests = [request(0, 40, 4, keys=range(1, 6)), request(1, 43, 4, keys=[1, 2, 3, 9, 10])]
    first, second = (list(each.spec.prompt_token_ids) for each in prepare(trace(requests)).requests)
    assert first[:24] == second[:24]
    assert (len(first), len(set(first + second))) == (40, 24 + 16 + 19), "no id stands twice"
    coarse = prepare(trace(requests), 8).requests
    assert [len(each.spec.prompt_token_ids) for each in coarse] == [5, 6]
    with pytest.raises(ValueError, match="at most 4294967280"):
        Marks([array("Q", [1])], 8).fresh(1 << 32)


@pytest.mark.parametrize("page_size", [8, 16, 32])
def test_cached_pages_are_found_by_whoever_knows_their_keys(page_size: int) -> None:
    """Pages of 16 with keys at every 8 tokens: of those that no request knows, only the end is known."""
    cached = [CachedPage(2, None, 5), CachedPage(4, 2, 4), CachedPage(90, None, 6), CachedPage(91, 90, 7)]
    warm = trace([request(0, 40, 4, keys=range(1, 6))], cached=cached)
    simulation = Simulation(warm, Setting(64, page_size, "lru"), STEP)
    counts = simulation.run()
    assert counts.hit_tokens == 32
    assert simulation.scheduler.cache.pool.num_cached == (2 * 32 + 43 - 32) // page_size
    assert simulation.scheduler.check() == []


@pytest.mark.parametrize("overlap", [False, True])
def test_each_sample_of_a_request_ends_after_its_own_tokens(overlap: bool) -> None:
    """With overlap a sample is in one step more, which was launched before its end was seen."""
    samples = trace([request(0, 20, 7, 1, 30)], limits=Limits(8, 256, 512, overlap=overlap))
    counts = Simulation(samples, Setting(64, 16, "lru"), STEP).run()
    assert counts.output_tokens == 38
    assert counts.num_requests == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_cancelled_within_its_prompt_leaves_its_step_alone(overlap: bool) -> None:
    cancelled = TraceRequest(0.0, 500, 5, array("Q"), [Output(0, array("Q"), 0.015)])
    limits = Limits(8, 64, 512, overlap=overlap)
    counts = Simulation(
        trace([cancelled, request(0, 20, 30)], limits=limits), Setting(64, 16, "lru"), STEP
    ).run()
    assert (counts.num_requests, counts.output_tokens) == (2, 30)
    assert counts.prompt_tokens_computed < 520


def test_what_ended_without_a_token_leaves_when_it_left() -> None:
    """A request that was cancelled in the queue does not hold up anybody for ever."""
    stuck = [request(0, 200, 300), request(0.1, 30, 0), request(0.2, 30, 5)]
    counts = Simulation(trace(stuck, limits=Limits(1, 256, 512)), Setting(64, 16, "lru"), STEP).run()
    assert counts.num_requests == 2
    assert counts.queue_seconds[-1] > 2.0


def test_requests_that_never_fit_are_refused_and_said_so() -> None:
    big = [request(0, 200, 100), request(1, 20, 4)]
    counts = Simulation(trace(big), Setting(10, 16, "lru"), STEP).run()
    assert (counts.num_refused, counts.num_requests) == (1, 1)
    open_end = TraceRequest(0.0, 100, 10_000, array("Q"), (Output(20, array("Q")),))
    counts = Simulation(trace([open_end]), Setting(10, 16, "lru"), STEP).run()
    assert counts.num_refused == 0, "a limit that was all the room there was would be less here"


@pytest.mark.parametrize("resolution", [1, 2, 4, 8])
@pytest.mark.parametrize("num_prompt", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47])
@pytest.mark.parametrize("num_output", [1, 2, 8, 9, 40])
def test_units_keep_the_pages_that_tokens_need(num_prompt: int, num_output: int, resolution: int) -> None:
    one = request(0, num_prompt, num_output)
    units = prompt_units(one, resolution)
    page = 16 // resolution
    assert -(-units // page) == -(-num_prompt // 16), "pages of the prompt"
    assert (units - 1) // page == (num_prompt - 1) // 16, "pages that may be found"
    computed = units + output_units(one, 0, resolution) - 1
    really = num_prompt + num_output - 1
    assert computed // page == max(really, units * resolution) // 16, "pages that are full at the end"


@pytest.mark.parametrize("resolution", [1, 2, 4, 8])
@pytest.mark.parametrize("num_prompt", [8, 9, 47, 48])
def test_the_longest_prompt_is_taken_in_any_unit(num_prompt: int, resolution: int) -> None:
    limits = Limits(1, 256, num_prompt + 1)
    counts = Simulation(
        trace([request(0, num_prompt, 1)], limits=limits), Setting(64, 16, "lru"), STEP, resolution=resolution
    ).run()
    assert (counts.num_refused, counts.num_requests, counts.output_tokens) == (0, 1, resolution)


def test_a_simulation_can_be_given_up(loaded: Loaded) -> None:
    with pytest.raises(Cancelled):
        Simulation(loaded.trace, Setting(PAGES, 16, "lru"), STEP, progress=lambda now: now < 5).run()


def test_the_time_of_steps_is_found_again() -> None:
    draw = random.Random(2)
    rows = [(draw.choice((0, 0, 300, 700)), draw.randint(0, 64), draw.randint(100, 9000)) for _ in range(500)]
    seconds = [(0.003 + 2e-5 * p + 4e-5 * s + 1e-7 * c) * draw.uniform(0.95, 1.05) for p, s, c in rows]
    found = fit(seconds, *([row[at] for row in rows] for at in range(3)))
    assert found is not None
    assert found.base == pytest.approx(0.003, rel=0.1)
    assert found.per_prompt_token == pytest.approx(2e-5, rel=0.05)
    assert found.per_sequence == pytest.approx(4e-5, rel=0.15)
    assert found.per_context_token == pytest.approx(1e-7, rel=0.15)
    assert found.median_error < 0.05
    assert fit(seconds[:5], [1] * 5, [1] * 5, [1] * 5) is None


def test_no_part_of_a_step_takes_negative_time() -> None:
    found = fit([0.02 - at * 1e-5 for at in range(200)], list(range(200)), [1] * 200, [10] * 200)
    assert found is not None
    assert min(found.base, found.per_prompt_token, found.per_sequence, found.per_context_token) >= 0


def logged(number: int, time_us: int, ends: Sequence[LoggedEnd], *, max_tokens: int = 9) -> LoggedRequest:
    keys = array("Q", [1, 2])
    return LoggedRequest(
        time_us, 0, SequenceId(number), f"r{number}", 2, 20, max_tokens, 0, True, True, keys, ends=list(ends)
    )


def test_samples_that_had_not_ended_go_on_to_their_limit() -> None:
    end = LoggedEnd(2_000_000, 0, SequenceId(8), 3, FinishCode.EOS, 0, None, 0, array("Q"))
    drained = LoggedEnd(2_500_000, 0, SequenceId(4), 2, FinishCode.DRAINED, 0, None, 0, array("Q"))
    requests = [logged(7, 1_500_000, [end]), logged(4, 500_000, [drained])]
    earlier, later = trace_requests(requests, 1_000_000, 512)
    assert (earlier.arrival, later.arrival) == (0.0, 0.5)
    assert [output.num_tokens for output in later.outputs] == [9, 3]
    assert [output.num_tokens for output in earlier.outputs] == [9, 9]
    assert later.outputs[1].end == 1.0


def test_a_limit_that_no_context_has_is_not_laid_out() -> None:
    requests = trace_requests([logged(4, 0, [], max_tokens=1 << 31)], 0, 512)
    assert [output.num_tokens for output in requests[0].outputs] == [492, 492]


# -- the Mooncake format -----------------------------------------------------------------------------------


def mooncake_lines(seed: int, count: int) -> list[dict[str, object]]:
    """Conversations of its shape: blocks of 512 tokens, ids by prefix."""
    draw = random.Random(seed)
    ids = iter(range(10**6))
    open_ones: list[tuple[list[int], int]] = []
    lines: list[dict[str, object]] = []
    now = 0
    for _ in range(count):
        now += int(draw.expovariate(1 / 300))
        blocks, length = draw.choice(open_ones) if open_ones and draw.random() < 0.6 else ([], 0)
        length += draw.randint(200, 3000)
        whole = blocks + [next(ids) for _ in range(-(-length // 512) - len(blocks))]
        output = draw.randint(1, 400)
        lines.append({"timestamp": now, "input_length": length, "output_length": output, "hash_ids": whole})
        open_ones = [*open_ones[-40:], (whole[: length // 512], length)]
    return lines


@pytest.fixture(scope="module")
def mooncake_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mooncake") / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in mooncake_lines(1, 150)))
    return path


def test_a_mooncake_trace_finds_what_its_ids_share(mooncake_file: Path) -> None:
    """With room for everything the hits are exactly the whole blocks that came before."""
    found = mooncake.load(mooncake_file, num_pages=20_000, page_size=512)
    seen: set[int] = set()
    shared = 0
    for line in mooncake_lines(1, 150):
        ids: list[int] = line["hash_ids"]  # type: ignore[assignment]
        length: int = line["input_length"]  # type: ignore[assignment]
        usable = ids[: (length - 1) // 512]
        for place, each in enumerate(usable):
            if each not in seen:
                usable = usable[:place]
                break
        shared += 512 * len(usable)
        seen |= set(ids[: length // 512])
    slow_arrivals = Trace(
        **{name: getattr(found, name) for name in Trace.__slots__}
        | {"requests": [each_later(one, 100 * at) for at, one in enumerate(found.requests)], "seconds": 1e9}
    )
    counts = Simulation(slow_arrivals, Setting(20_000, 512, "lru"), STEP, resolution=64).run()
    assert counts.hit_tokens == shared
    assert counts.looked_up_tokens == found.num_tokens


def test_ids_of_blocks_are_told_apart_by_what_is_before_them(tmp_path: Path) -> None:
    """An id should stand for a whole prefix; in some files it stands for the block alone."""
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 0, "input_length": 2100, "output_length": 4, "hash_ids": [7, 7, 8, 7, 9]}]
    lines += [{"timestamp": 9000, "input_length": 2100, "output_length": 4, "hash_ids": [7, 7, 7, 7, 9]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = mooncake.load(path, num_pages=100, page_size=512)
    first, second = (list(one.keys) for one in found.requests)
    assert len(set(first)) == len(set(second)) == 4
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, True, False, False]
    counts = Simulation(found, Setting(100, 512, "lru"), STEP, resolution=64).run()
    assert (counts.hit_tokens, counts.miss_cold_tokens) == (2 * 512, 6 * 512)


def each_later(one: TraceRequest, seconds: float) -> TraceRequest:
    return TraceRequest(seconds, one.num_prompt, one.max_tokens, one.keys, one.outputs)


def test_its_hit_rate_by_pool_size_is_drawn(
    mooncake_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from kvatlas.cli import whatif, whatif_picture

    pools = ["--pool-pages", "100", "--pages", "0.25x,1x,4x", "--page-size", "512", "--resolution", "64"]
    arguments = [str(mooncake_file), *pools]
    assert what_if.main([*arguments, "--policy", "lru,lfu", "--progress"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.err.splitlines()[-1])["total"] == 6
    document = json.loads(captured.out)
    ratios = [result["hit_ratio"] for result in document["results"] if result["policy"] == "lru"]
    assert ratios == sorted(ratios)
    assert ratios[-1] > ratios[0] + 0.1
    assert any("assumed" in note for note in document["notes"])
    whatif.show(document, Console(width=60))
    table = capsys.readouterr().out
    assert "0.25" not in table
    document["trace"] |= {"requests": 1, "prompt_tokens": 1}
    whatif.show(document, Console(width=200))
    assert ": 1 request, 1 prompt token, " in capsys.readouterr().out
    assert f"{ratios[1]:.1%}" in table
    assert "…" not in table, "a narrow terminal cuts no number"
    assert len(re.findall(r"^ *(?:25|100|400) +512 .* ms +[\d,]+ ms +[\d,]+ *$", table, re.MULTILINE)) == 6
    for suffix in ("svg", "png"):
        path = tmp_path / f"curve.{suffix}"
        whatif_picture.draw(document, path)
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
        whatif_picture.draw(document, path)
        assert path.read_bytes() == data, "the same figures make the same picture"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 3}', "hash_ids"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 3, "hash_ids": []}', "0 hash_ids for 600"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 3, "hash_ids": []}', "0 prompt"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 3, "hash_ids": []}', "nan s"),
        ('{"timestamp": 1e999, "input_length": 5, "output_length": 3, "hash_ids": []}', "inf s"),
        ('{"timestamp": 1, "input_length": Infinity, "output_length": 3, "hash_ids": []}', "OverflowError"),
        ('{"timestamp": "x", "input_length": 5, "output_length": 3, "hash_ids": []}', "ValueError"),
    ],
)
def test_a_line_of_another_format_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [1]}\n' + line + "\n"
    )
    with pytest.raises(BadTrace, match=why):
        mooncake.load(path, num_pages=10)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--pages", "none"], "neither a number"),
        (["--pages", "0"], "0 pages"),
        (["--page-size", "0"], "a page of 0 tokens"),
        (["--policy", "belady"], "none of lru"),
        (["--resolution", "3"], "does not divide"),
        (["--resolution", "-1"], "does not divide"),
        (["--host-tier", "20GB"], "no host tier"),
        (["--pages", ",".join(map(str, range(1, 300)))], "at most 256"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(
    mooncake_file: Path, capsys: pytest.CaptureFixture[str], flags: list[str], why: str
) -> None:
    assert what_if.main([str(mooncake_file), "--pool-pages", "300", *flags]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert str(mooncake_file) not in said, "nothing is wrong with the file"


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "soon"])
def test_a_warm_up_that_is_no_time_is_refused(
    mooncake_file: Path, capsys: pytest.CaptureFixture[str], seconds: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        what_if.main([str(mooncake_file), "--pool-pages", "300", f"--warmup={seconds}"])
    assert refused.value.code == 2
    assert seconds in capsys.readouterr().err


def test_steps_of_no_time_tell_nothing() -> None:
    assert fit([0.0] * 100, [1] * 100, [1] * 100, [1] * 100) is None


def test_a_file_that_is_not_there_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert what_if.main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'none'}: No such file or directory\n"


@pytest.mark.parametrize("costs", ["nan,1,1,1", "1,inf,1,1", "1,1,1,nan", "0,0,0,1", "-1,1,1,1", "1,2"])
def test_costs_of_a_step_that_are_no_times_are_refused(
    mooncake_file: Path, capsys: pytest.CaptureFixture[str], costs: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        what_if.main([str(mooncake_file), "--pool-pages", "300", f"--step-model={costs}"])
    assert refused.value.code == 2
    assert costs in capsys.readouterr().err
