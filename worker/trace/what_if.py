"""What if the pool were another: `python -m worker.trace.what_if FILE`, as JSON. `kvatlas whatif` shows it.

Runs the requests of a recording, or of a trace in the Mooncake format, through the worker's own scheduler,
pool and trie under each combination of pool size, page size and eviction policy.
"""

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from worker.pages.eviction import POLICIES
from worker.readers.recording_file import DamagedRecording
from worker.trace import mooncake
from worker.trace.counts import Counts, Setting
from worker.trace.loading import Loaded, load
from worker.trace.mooncake import ASSUMED_STEP, BadTrace
from worker.trace.observed import Observed
from worker.trace.prepared import prepare
from worker.trace.simulation import Simulation
from worker.trace.step_time import StepTime
from worker.trace.workload import Trace

MAX_SETTINGS = 256
COARSEST = 8  # tokens of a unit, unless asked for
EXACT_REQUESTS = 2_000  # up to so many, units are single tokens
MAX_PAGES = 1 << 24
PROGRESS_SECONDS = 0.2
PERCENTILES = (0.5, 0.9, 0.99)
USAGE_STATUS = 2


class BadQuestion(Exception):
    """Something was asked that cannot be answered; the text is for the user."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be tried on which trace."""

    trace: Trace
    step_time: StepTime
    settings: Sequence[Setting]
    resolution: int = 0  # 0: automatic
    warmup_seconds: float = 0.0
    observed: Observed | None = None
    notes: Sequence[str] = ()


def settings_of(
    trace: Trace, pages: Sequence[str], page_sizes: Sequence[int], policies: Sequence[str]
) -> list[Setting]:
    """Every combination; ``pages``: numbers, or multiples of the pool ("0.5x"). Raises BadQuestion."""
    unknown = [name for name in policies if name not in POLICIES]
    if unknown:
        raise BadQuestion(f"policy {unknown[0]!r} is none of {', '.join(POLICIES)}")
    if bad := [size for size in page_sizes if not 1 <= size <= 4096]:
        raise BadQuestion(f"a page of {bad[0]} tokens is not possible")
    found = [
        Setting(_num_pages(trace, size, text), size, policy)
        for size in page_sizes or (trace.page_size,)
        for policy in policies or (trace.policy,)
        for text in pages or ("0.5x", "1x", "2x")
    ]
    if len(found) > MAX_SETTINGS:
        raise BadQuestion(f"{len(found)} combinations, at most {MAX_SETTINGS} are run at once")
    return found


def _num_pages(trace: Trace, page_size: int, text: str) -> int:
    """Pages of one setting; a multiple means as many slots, whatever the page size."""
    try:
        if text.endswith("x"):
            count = round(float(text[:-1]) * trace.num_pages * trace.page_size / page_size)
        else:
            count = int(text)
    except (ValueError, OverflowError):
        raise BadQuestion(f"pages {text!r}: neither a number nor a multiple such as 0.5x") from None
    if not 1 <= count <= MAX_PAGES:
        raise BadQuestion(f"pages {text!r}: {count} pages are not possible")
    return count


def resolution_of(question: Question) -> int:
    """Tokens of a unit: what was asked for, one for short traces, else as coarse as pages and keys allow."""
    common = math.gcd(question.trace.granularity, *[setting.page_size for setting in question.settings])
    if question.resolution:
        if question.resolution < 0 or common % question.resolution:
            raise BadQuestion(
                f"a resolution of {question.resolution} tokens does not divide pages and keys ({common})"
            )
        return question.resolution
    if len(question.trace.requests) <= EXACT_REQUESTS:
        return 1
    return math.gcd(common, COARSEST)


def answer(
    question: Question, progress: Callable[[int, float], bool] = lambda done, share: True
) -> Iterator[Counts]:
    """Runs the settings one after the other. ``progress``: settings done and share of the one that runs."""
    resolution = resolution_of(question)
    seconds = max(question.trace.seconds, 1e-9)
    prepared = prepare(question.trace, resolution)
    for number, setting in enumerate(question.settings):

        def tell(now: float, number: int = number) -> bool:
            return progress(number, min(1.0, now / seconds))

        yield Simulation(
            question.trace,
            setting,
            question.step_time,
            resolution=resolution,
            prepared=prepared,
            count_from=question.warmup_seconds,
            progress=tell,
        ).run()


def notes_of(trace: Trace, settings: Sequence[Setting], loaded: Loaded | None) -> list[str]:
    """What makes these answers less than exact."""
    found = []
    finer = sorted({setting.page_size for setting in settings if setting.page_size % trace.granularity})
    if finer:
        sizes = ", ".join(map(str, finer))
        found.append(
            f"keys stand at every {trace.granularity} tokens: with pages of {sizes} a prefix is shared only"
            f" as far as whole keys go, so hits are estimated low"
        )
    if trace.cached and any(setting.num_slots > trace.num_pages * trace.page_size for setting in settings):
        found.append(
            "the cache was warm when the recording began: what a larger pool would still have held from"
            " before is not known, so its first hits are estimated low (--warmup leaves the beginning out)"
        )
    if loaded is not None and loaded.lost_records:
        found.append(f"{loaded.lost_records} requests, ends or steps are missing in the recording")
    if loaded is not None and loaded.lost_events:
        found.append(
            f"{loaded.lost_events} page events are missing in the recording, and their evictions in what was"
            f" observed"
        )
    return found


def result_of(counts: Counts) -> dict[str, object]:
    """One line of the table."""
    waits = sorted(counts.queue_seconds)
    return {
        **asdict(counts.setting),
        "pool_slots": counts.setting.num_slots,
        "requests": counts.num_requests,
        "refused": counts.num_refused,
        "hit_ratio": counts.hit_ratio,
        "hit_ratio_error": counts.hit_ratio_error,
        "hit_tokens": counts.hit_tokens,
        "miss_cold_tokens": counts.miss_cold_tokens,
        "miss_evicted_tokens": counts.miss_evicted_tokens,
        "unaligned_tokens": counts.unaligned_tokens,
        "evictions": counts.evictions,
        "preemptions": counts.preemptions,
        "recomputed_tokens": counts.recomputed_tokens,
        "prompt_tokens_computed": counts.prompt_tokens_computed,
        "output_tokens": counts.output_tokens,
        "fragmentation": counts.fragmentation,
        "mean_wasted_slots": counts.mean_wasted_slots,
        "queue_seconds": {
            f"p{round(share * 100)}": waits[min(len(waits) - 1, int(share * len(waits)))] if waits else 0.0
            for share in PERCENTILES
        },
        "mean_queue_seconds": counts.mean_queue_seconds,
        "seconds": counts.seconds,
        "steps": counts.num_steps,
    }


def _observed(found: Observed | None) -> dict[str, object] | None:
    if found is None:
        return None
    return {**asdict(found), "hit_ratio": found.hit_ratio}


def _read_question(settings: argparse.Namespace) -> Question:
    is_mooncake = settings.format == "mooncake" or (
        settings.format == "auto" and settings.file.suffix in (".jsonl", ".json")
    )
    loaded = None if is_mooncake else load(settings.file)
    if loaded is None:
        if settings.pool_pages <= 0:
            raise BadQuestion("a trace without a pool of its own needs --pool-pages: what 1x means")
        trace = mooncake.load(
            settings.file, num_pages=settings.pool_pages, page_size=(settings.page_size or [512])[0]
        )
    else:
        trace = loaded.trace
    if not trace.requests:
        raise BadQuestion("there are no requests in it")
    tried = settings_of(trace, settings.pages, settings.page_size, settings.policy)
    notes = notes_of(trace, tried, loaded)
    step_time = settings.step_model or (loaded.step_time if loaded is not None else None)
    if step_time is None:
        step_time = ASSUMED_STEP
        notes.append("the time of a step is assumed, not fitted: --step-model sets it")
    return Question(
        trace,
        step_time,
        tried,
        resolution=settings.resolution,
        warmup_seconds=settings.warmup,
        observed=loaded.observed if loaded is not None else None,
        notes=notes,
    )


def _step_model(text: str) -> StepTime:
    """base ms, us a prompt token, us a sequence, ns a token of context."""
    try:
        base, prompt, sequence, context = (float(part) for part in text.split(","))
        found = StepTime(base / 1e3, prompt / 1e6, sequence / 1e6, context / 1e9)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not MS,US,US,NS") from None
    is_finite = math.isfinite(base + prompt + sequence + context)
    if not is_finite or min(base, prompt, sequence, context) < 0 or not base + prompt + sequence:
        raise argparse.ArgumentTypeError(f"{text!r} makes steps of no time")
    return found


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return found


def _list_of(kind: type) -> Callable[[str], list[object]]:
    def read(text: str) -> list[object]:
        try:
            return [kind(part) for part in text.split(",") if part]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from None

    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvatlas whatif", description=__doc__.partition(":")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--format", choices=("auto", "recording", "mooncake"), default="auto")
    parser.add_argument("--pages", type=_list_of(str), default=[], help="pool sizes: 4096, or 0.5x,1x,2x")
    parser.add_argument("--page-size", type=_list_of(int), default=[], help="tokens per page: 8,16,32")
    parser.add_argument("--policy", type=_list_of(str), default=[], help="lru,lfu,fifo,cost")
    parser.add_argument("--pool-pages", type=int, default=0, help="what 1x means, for traces without a pool")
    parser.add_argument(
        "--warmup", type=_seconds, default=0.0, help="seconds at the beginning that do not count"
    )
    parser.add_argument("--resolution", type=int, default=0, help="tokens that move as one; 0: automatic")
    parser.add_argument("--step-model", type=_step_model, metavar="MS,US,US,NS")
    parser.add_argument("--host-tier", default="", help="refused: this worker has none")
    parser.add_argument("--progress", action="store_true", help="JSON lines on stderr")
    return parser


class _Progress:
    """A line of JSON now and then."""

    def __init__(self, total: int, is_told: bool) -> None:
        self._total = total
        self._is_told = is_told
        self._next = 0.0

    def __call__(self, done: int, share: float) -> bool:
        now = time.monotonic()
        if self._is_told and now >= self._next:
            self._next = now + PROGRESS_SECONDS
            line = json.dumps({"done": done + share, "total": self._total})
            print(line, file=sys.stderr, flush=True)  # noqa: T201
        return True


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    settings = _parser().parse_args(arguments)
    try:
        if settings.host_tier:
            raise BadQuestion(
                "--host-tier: the worker has no host tier, and what-if models only what it runs"
            )
        question = _read_question(settings)
        resolution = resolution_of(question)
    except BadQuestion as error:
        print(error, file=sys.stderr)  # noqa: T201
        return USAGE_STATUS
    except (BadTrace, DamagedRecording, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        print(f"{settings.file}: {why}", file=sys.stderr)  # noqa: T201
        return USAGE_STATUS
    calm_collector()
    began = time.perf_counter()
    progress = _Progress(len(question.settings), settings.progress)
    results = [result_of(counts) for counts in answer(question, progress)]
    taken = time.perf_counter() - began
    print(json.dumps(_document(question, resolution, results, taken)))  # noqa: T201
    return 0


def calm_collector() -> None:
    """What a simulation makes is freed by reference counts, its cycles are few: a fifth of the time less."""
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)


def _document(
    question: Question, resolution: int, results: list[dict[str, object]], seconds: float
) -> dict[str, object]:
    trace = question.trace
    return {
        "trace": {
            "name": trace.name,
            "requests": len(trace.requests),
            "prompt_tokens": trace.num_tokens,
            "seconds": trace.seconds,
            "num_pages": trace.num_pages,
            "page_size": trace.page_size,
            "policy": trace.policy,
            "granularity": trace.granularity,
            "limits": asdict(trace.limits),
            "warm_pages": len(trace.cached),
        },
        "resolution": resolution,
        "warmup_seconds": question.warmup_seconds,
        "step_time": asdict(question.step_time),
        "observed": _observed(question.observed),
        "notes": list(question.notes),
        "results": results,
        "taken_seconds": seconds,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
