"""Output tokens per second of the engine alone: all prompts at once, no service in between.

Workloads: benchmarks/workloads.py. Temperature 0.6, EOS ignored.
`python -m benchmarks.offline --model random:qwen3-0.6b --device cuda`; the figure is over the whole call,
prefill included.
"""

import argparse
import gc
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.record import write_result
from benchmarks.slow_steps import SlowSteps, Times
from benchmarks.workloads import TEMPERATURE, Workload, fixed, named
from worker import first_tokens
from worker.config import WorkerConfig
from worker.devices import choose_device
from worker.execution.runner import Runner, StepHandle
from worker.ids import SequenceId
from worker.pages.page_cache import CacheConfig
from worker.scheduling.request import AddStatus, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step

PEAK_SEQUENCES = 256
DRAWN = SamplingParams(temperature=TEMPERATURE)


@dataclass
class Tally:
    """What came, and where the host's time went, in seconds."""

    steps: int = 0
    output_tokens: int = 0  # that came; fewer than asked for where a sequence failed
    schedule: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    commit: float = 0.0
    first_token: float = 0.0
    prompts: float = 0.0  # from the beginning to the end of the last step with prompt tokens
    slowest: SlowSteps = field(default_factory=SlowSteps)

    def times(self) -> Times:
        """Of the parts of a step, so far."""
        return Times(self.schedule, self.launch, self.wait, self.commit)


class Engine:
    """Scheduler and runner in one loop, a step ahead where the device runs by itself."""

    def __init__(self, config: WorkerConfig) -> None:
        device = choose_device(config)
        facts = device.facts(config)
        self.config = config.resolved(
            model_context=facts.model.max_context_tokens, automatic_pages=facts.automatic_pages
        )
        self.runner: Runner = device.build(self.config)
        self.device_name = facts.device_name
        self.vocab_size = facts.model.vocab_size
        self._doubling_context = facts.doubling_context
        self.overlap = bool(self.config.overlap)
        self._scheduler = self.scheduler()  # as long as the engine, as in a worker
        self._next_id = 1
        # As a worker after its start: a full collection in the middle of a pass walked all that torch holds,
        # 0.3 s for 178,000 objects on a slow core.
        gc.collect()
        gc.freeze()

    def run(self, workload: Workload, asked: Sequence[SamplingParams] = ()) -> Tally:
        """Answers everything. Prompts of runs before are cached.

        `asked`: how each prompt's tokens are picked, where not all are DRAWN; lengths are the workload's and
        every prompt has a seed of its own. Ids outside the model's vocabulary become others within it.
        """
        scheduler = self._scheduler
        before = scheduler.counts().output_tokens_total
        prompts = workload.within(self.vocab_size).prompts
        each = asked or [DRAWN] * len(prompts)
        for prompt, count, params in zip(prompts, workload.output_tokens, each, strict=True):
            params = replace(params, max_tokens=count, stop_at_eos=False, seed=self._next_id)
            spec = RequestSpec(SequenceId(self._next_id), array("I", prompt), params)
            outcome = scheduler.add(spec, time.monotonic())
            assert outcome.status is AddStatus.ACCEPTED, outcome
            self._next_id += 1
        tally = Tally()
        with tally.slowest.watching():
            self._drive(scheduler, tally)
        tally.output_tokens = scheduler.counts().output_tokens_total - before
        return tally

    def forget(self) -> None:
        """Empties the prefix cache: for runs with the ids of one before."""
        self._scheduler.flush(time.monotonic())

    def _drive(self, scheduler: Scheduler, tally: Tally) -> None:
        in_flight: deque[tuple[Step, StepHandle]] = deque()
        clock = time.perf_counter
        began = clock()
        while True:
            before = tally.times()
            finished = in_flight[0][0] if in_flight else None
            if len(in_flight) == 1 and first_tokens.are_there(*in_flight[0]):
                self._commit(scheduler, in_flight, tally, began)
            start = clock()
            step = scheduler.schedule(time.monotonic())
            scheduled = clock()
            tally.schedule += scheduled - start
            if step is not None:
                in_flight.append((step, self.runner.launch(step)))
                tally.steps += 1
                tally.launch += clock() - scheduled
            keep = 1 if self.overlap and step is not None else 0
            while len(in_flight) > keep:
                self._commit(scheduler, in_flight, tally, began)
            tally.slowest.turn(step, finished, before, tally.times())
            if not in_flight and not scheduler.has_work(time.monotonic()):
                return

    @staticmethod
    def _commit(
        scheduler: Scheduler, in_flight: deque[tuple[Step, StepHandle]], tally: Tally, began: float
    ) -> None:
        clock = time.perf_counter
        oldest, handle = in_flight.popleft()
        before = clock()
        result = handle.result()
        waited = clock()
        scheduler.commit(oldest, result, time.monotonic())
        tally.wait += waited - before
        tally.commit += clock() - waited
        if oldest.num_decode < len(oldest.rows):
            tally.prompts = waited - began
        outputs = scheduler.take_outputs()
        if not tally.first_token and any(columns.token_ids for columns in outputs.values()):
            tally.first_token = clock() - began

    def scheduler(self) -> Scheduler:
        """A fresh one, with an empty prefix cache."""
        config = self.config
        return Scheduler(
            SchedulerConfig(
                cache=CacheConfig(num_pages=config.num_pages, page_size=config.page_size),
                max_running=config.max_running,
                max_step_tokens=config.max_batch_tokens,
                max_chunk_tokens=config.max_chunk_tokens,
                doubling_context=self._doubling_context,
                max_context_tokens=config.max_context,
            )
        )


def measure(engine: Engine, workload: Workload) -> dict[str, object]:
    """One workload, once, with an empty prefix cache. AssertionError when tokens are missing."""
    engine.forget()
    began = time.perf_counter()
    tally = engine.run(workload)
    seconds = time.perf_counter() - began
    tokens = tally.output_tokens
    assert tokens == sum(workload.output_tokens), f"{tokens} tokens of {sum(workload.output_tokens)}"
    return {
        "workload": workload.name,
        "tokens_per_second": round(tokens / seconds, 1),
        "output_tokens": tokens,
        "prompt_tokens": sum(map(len, workload.prompts)),
        "seconds": round(seconds, 3),
        "first_token_seconds": round(tally.first_token, 4),
        "prompts_seconds": round(tally.prompts, 4),
        "steps": tally.steps,
        "host_us_per_step": {
            name: round(getattr(tally, name) / tally.steps * 1e6, 1)
            for name in ("schedule", "launch", "wait", "commit")
        },
        "slowest_turns": tally.slowest.report(),
    }


def options(arguments: argparse.Namespace) -> list[str]:
    """What is not the default, for the name of the result."""
    found = [] if arguments.attention_backend == "auto" else [arguments.attention_backend]
    found += ["fp8-weights"] if arguments.weight_dtype == "fp8" else []
    found += ["fp8-pages"] if arguments.kv_dtype == "fp8" else []
    return found + (["deterministic"] if arguments.deterministic else [])


def main() -> None:
    """Runs the named workloads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--workloads", nargs="*", default=["b1", "b8", "b64", "offline256"])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--max-batch-tokens", type=int, default=16_384, help="as for vLLM beside it")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--weight-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--deterministic", action="store_true")
    arguments = parser.parse_args()
    began = time.perf_counter()
    engine = Engine(
        WorkerConfig(
            model=arguments.model,
            device=arguments.device,
            page_size=arguments.page_size,
            max_running=PEAK_SEQUENCES,
            max_batch_tokens=arguments.max_batch_tokens,
            max_context=4096,
            memory_ratio=0.8,
            overlap=False if arguments.no_overlap else None,
            attention_backend=arguments.attention_backend,
            weight_dtype=arguments.weight_dtype,
            kv_dtype=arguments.kv_dtype,
            deterministic=arguments.deterministic,
        )
    )
    print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
    engine.run(fixed(2, 64, 16))
    rows = []
    for name in arguments.workloads:
        rows.append(measure(engine, named(name)))
        print(rows[-1], flush=True)
    shape = arguments.model.removeprefix("random:")
    device = engine.device_name if arguments.device == "cuda" else ""
    name = "-".join([f"offline-{shape}", *options(arguments)])
    print(write_result(name, {"rows": rows}, ["torch", "triton", "numpy"], device=device))


if __name__ == "__main__":
    main()
