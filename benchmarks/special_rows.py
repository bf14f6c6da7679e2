"""What rows that want more than a draw cost a decode step, and their neighbours: microseconds by case.

    python -m benchmarks.special_rows --model random:qwen3-0.6b --device cuda
    python -m benchmarks.special_rows --model random:tiny --device cpu --sequences 4 --tokens 16

All sequences run side by side, through the scheduler and the runner that a worker has. Cases take turns, so
that whatever else the machine does meets all of them; each one's first pass is apart, with what it compiles.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.offline import DRAWN, Engine
from benchmarks.record import write_result
from benchmarks.workloads import Workload, fixed
from worker.config import WorkerConfig
from worker.scheduling.sampling import SamplingParams

PROMPT_TOKENS = 32


@dataclass(slots=True)
class EvenTokens:
    """A constraint, and where an output stands in it: every second token, whatever came before. It costs
    next to nothing to follow, so that what is measured is the draw.
    """

    num_tokens: int = 0

    def begin(self, output_ids: Iterable[int] = ()) -> "EvenTokens":
        """See worker.scheduling.sampling.Constraint."""
        return EvenTokens(len(tuple(output_ids)))

    def take(self, token_ids: Iterable[int]) -> None:
        """See worker.scheduling.sampling.Progress, as the next two."""
        self.num_tokens += len(tuple(token_ids))

    def take_back(self, count: int) -> None:
        """Forgets the last tokens."""
        self.num_tokens -= count

    def write_mask(self, address: int, num_bytes: int) -> None:
        """Bits 0, 2, 4, … of every byte."""
        ctypes.memset(address, 0b01010101, num_bytes)


def cases(num_sequences: int) -> dict[str, list[SamplingParams]]:
    """How each sequence's tokens are picked, by the name of the case."""
    others = [DRAWN] * (num_sequences - 1)
    return {
        "none": [DRAWN, *others],
        "one_logprobs": [replace(DRAWN, logprobs=5), *others],
        "one_presence_penalty": [replace(DRAWN, presence_penalty=0.5), *others],
        "all_repetition_penalty": [replace(DRAWN, repetition_penalty=1.05)] * num_sequences,
        "one_constraint": [replace(DRAWN, constraint=EvenTokens()), *others],
    }


def decode_step_us(engine: Engine, workload: Workload, asked: list[SamplingParams]) -> tuple[float, float]:
    """Microseconds of a step without prompts, and seconds of the whole pass."""
    engine.forget()
    began = time.perf_counter()
    tally = engine.run(workload, asked)
    seconds = time.perf_counter() - began
    assert tally.output_tokens == sum(workload.output_tokens), f"{tally.output_tokens} tokens came"
    num_decodes = max(workload.output_tokens) - 1  # the first token is of the step with the prompt
    return (seconds - tally.prompts) / num_decodes * 1e6, seconds


def measure(engine: Engine, num_sequences: int, num_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """A row of figures for each case."""
    workload, all_cases = fixed(num_sequences, PROMPT_TOKENS, num_tokens), cases(num_sequences)
    firsts = {name: decode_step_us(engine, workload, asked)[1] for name, asked in all_cases.items()}
    found: dict[str, list[float]] = {name: [] for name in all_cases}
    for _ in range(repeats):
        for name, asked in all_cases.items():
            found[name].append(decode_step_us(engine, workload, asked)[0])
    plain = statistics.median(found["none"])
    return [
        {
            "case": name,
            "decode_step_us": round(statistics.median(us), 1),
            "least_us": round(min(us), 1),
            "most_us": round(max(us), 1),
            "times_a_plain_step": round(statistics.median(us) / plain, 3),
            "first_pass_seconds": round(firsts[name], 3),
        }
        for name, us in found.items()
    ]


def main() -> None:
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--deterministic", action="store_true")
    arguments = parser.parse_args()
    engine = Engine(
        WorkerConfig(
            model=arguments.model,
            device=arguments.device,
            max_running=arguments.sequences,
            max_batch_tokens=max(2048, arguments.sequences * PROMPT_TOKENS),  # all prompts in one step
            max_context=1024,
            num_pages=arguments.sequences * 64,
            deterministic=arguments.deterministic,
        )
    )
    rows = measure(engine, arguments.sequences, arguments.tokens, arguments.repeats)
    for row in rows:
        print(row, flush=True)
    figures = {"sequences": arguments.sequences, "output_tokens": arguments.tokens, "rows": rows}
    name = f"special-rows-{arguments.model.removeprefix('random:')}"
    name += "-deterministic" if arguments.deterministic else ""
    device = engine.device_name if arguments.device == "cuda" else ""
    print(write_result(name, figures, ["torch", "triton", "numpy"], device=device))


if __name__ == "__main__":
    main()
