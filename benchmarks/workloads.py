"""The workloads that engines are compared on, seeded: the same numbers for every engine and on every path.

offline256 is what nano-vllm and mini-sglang publish: 256 prompts of 100..1024 random ids, 100..1024 output
tokens each. b1, b8, b64 are so many prompts of 512 ids with 256 output tokens each. first512 is one prompt of
so many ids with one output token. No workload has a prompt of another one.
"""

import random
from dataclasses import dataclass, replace

from kvatlas.models.shapes import SHAPES

LOWEST_ID, HIGHEST_ID = 3, 10_000
TEMPERATURE = 0.6  # of every workload; EOS is ignored
FIRST_TOKEN = "first"  # begins the name of a workload that is one first token


@dataclass(frozen=True)
class Workload:
    """Prompts and how many tokens each is to be answered with."""

    name: str
    prompts: list[list[int]]
    output_tokens: list[int]

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def peak_tokens(self) -> int:
        """Most tokens that are held at once when all begin together and one token each is added a step."""
        lengths = list(zip(map(len, self.prompts), self.output_tokens, strict=True))
        return max(
            sum(prompt + n for prompt, count in lengths if count >= n) for n in set(self.output_tokens)
        )

    def within(self, id_limit: int) -> "Workload":
        """The same with ids below the limit: for models with a small vocabulary."""
        if id_limit > HIGHEST_ID:
            return self
        span = id_limit - LOWEST_ID
        return replace(self, prompts=[[LOWEST_ID + n % span for n in prompt] for prompt in self.prompts])

    def renamed(self, number: int) -> "Workload":
        """The same lengths with other ids, so that a second pass finds nothing in a prefix cache."""
        span = HIGHEST_ID - LOWEST_ID + 1
        prompts = [[LOWEST_ID + (n - LOWEST_ID + 997 * number) % span for n in p] for p in self.prompts]
        return replace(self, prompts=prompts)


def published(num_sequences: int, limit: int = 1024) -> Workload:
    """The workload that nano-vllm and mini-sglang publish; the same random numbers."""
    draw = random.Random(0)
    prompts = [
        [draw.randint(LOWEST_ID, HIGHEST_ID) for _ in range(draw.randint(100, limit))]
        for _ in range(num_sequences)
    ]
    answers = [draw.randint(100, limit) for _ in range(num_sequences)]
    return Workload(f"offline{num_sequences}", prompts, answers)


def fixed(num_sequences: int, prompt_tokens: int = 512, output_tokens: int = 256, seed: int = 1) -> Workload:
    """Prompts of one length, answers of one length."""
    draw = random.Random(seed)
    prompts = [
        [draw.randint(LOWEST_ID, HIGHEST_ID) for _ in range(prompt_tokens)] for _ in range(num_sequences)
    ]
    return Workload(f"b{num_sequences}", prompts, [output_tokens] * num_sequences)


def named(name: str) -> Workload:
    """offline<n>, b<n> or first<n>. ValueError for other names."""
    if name.startswith("offline"):
        return published(int(name.removeprefix("offline")))
    if name.startswith(FIRST_TOKEN):
        length = int(name.removeprefix(FIRST_TOKEN))
        return replace(fixed(1, length, 1, seed=1000 + length), name=name)
    if name.startswith("b"):
        count = int(name.removeprefix("b"))
        return fixed(count, seed=count)
    raise ValueError(f"no workload is called {name!r}")


def id_limit(model: str) -> int:
    """Ids that a model is sure to know are below this."""
    shape = SHAPES.get(model.removeprefix("random:"), {})
    size = shape.get("vocab_size", HIGHEST_ID + 1)
    assert isinstance(size, int), f"vocabulary of {model}"
    return min(size, HIGHEST_ID + 1)
