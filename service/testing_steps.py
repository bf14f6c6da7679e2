"""What the scripted worker of service/testing_worker.py says of one step: ends, starts, tokens, scores.

Owns the columns of StepOutput. Knows no sockets and no script.
"""

import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from kvatlas.worker.v1 import worker_pb2
from service.request import NO_TOKEN


@dataclass(slots=True)
class ScriptedSequence:
    """One sample on the scripted worker."""

    sequence_id: int
    first_id: int
    choice: int
    add: worker_pb2.AddSequence
    prompt: list[int]
    service: bytes
    num_tokens: int  # output, resumed tokens included
    next_at: float
    arrived_at: float
    script: Mapping[str, str]
    has_started: bool = False
    ends_with: int = 0  # FinishCode that is due
    hold_at: int = -1  # output tokens after which it stands still


class StepMessage:
    """A StepOutput in the making."""

    def __init__(self) -> None:
        self._ids, self._tokens, self._codes = array("Q"), array("I"), bytearray()
        self._scores: list[tuple[int, int] | None] = []  # (token, alternatives)
        self._starts: dict[int, worker_pb2.SequenceStart] = {}
        self._prompts: list[worker_pb2.PromptLogprobs] = []
        self._output = worker_pb2.StepOutput(step=1, step_us=1000)
        self.ends = self._output.ends

    def start(self, sequence: ScriptedSequence) -> None:
        """The run left the queue; once for all its samples."""
        if sequence.first_id in self._starts or sequence.sequence_id != sequence.first_id:
            return
        prompt = len(sequence.prompt)
        queue_us = int((time.monotonic() - sequence.arrived_at) * 1e6)
        start = worker_pb2.SequenceStart(sequence_id=sequence.first_id, queue_us=queue_us)
        if not sequence.add.params.HasField("prompt_logprobs"):
            hit = 16 if prompt > 16 and sequence.add.cache_read else 0
            start.prefix.hit_tokens = hit
            start.prefix.miss_cold_tokens = (prompt - hit) // 16 * 16
            start.prefix.unaligned_tokens = prompt - hit - start.prefix.miss_cold_tokens
        else:
            self._prompts.append(prompt_scores(sequence))
        self._starts[sequence.first_id] = start

    def put(self, sequence: ScriptedSequence, token: int, code: int) -> None:
        """An entry of the columns."""
        self._ids.append(sequence.sequence_id)
        self._tokens.append(token)
        self._codes.append(code)
        wants = sequence.add.params.HasField("logprobs") and token != NO_TOKEN
        self._scores.append((token, sequence.add.params.logprobs) if wants else None)

    def message(self) -> worker_pb2.StepOutput:
        """All of it."""
        self._output.starts.extend(self._starts.values())
        self._output.sequence_ids = self._ids.tobytes()
        self._output.token_ids = self._tokens.tobytes()
        self._output.finish_codes = bytes(self._codes)
        self._output.prompt_logprobs.extend(self._prompts)
        if any(score is not None for score in self._scores):
            self._output.logprobs.CopyFrom(_columns(self._scores))
        return self._output


def _columns(scores: "list[tuple[int, int] | None]") -> worker_pb2.LogprobColumns:
    """Made-up log-probabilities that a test can compute: -token / 100; alternatives token + 1, + 2, ..."""
    known = [score if score is not None else (-1, 0) for score in scores]
    others = [token + place for token, count in known for place in range(1, count + 1)]
    return worker_pb2.LogprobColumns(
        logprobs=array("f", [float("nan") if token < 0 else -token / 100 for token, _ in known]).tobytes(),
        ranks=array("I", [0 if token < 0 else 1 for token, _ in known]).tobytes(),
        alternative_counts=bytes(count for _, count in known),
        alternative_token_ids=array("I", others).tobytes(),
        alternative_logprobs=array("f", [-other / 100 for other in others]).tobytes(),
    )


def prompt_scores(sequence: ScriptedSequence) -> worker_pb2.PromptLogprobs:
    count = sequence.add.params.prompt_logprobs
    scores: list[tuple[int, int] | None] = [None, *((token, count) for token in sequence.prompt[1:])]
    return worker_pb2.PromptLogprobs(sequence_id=sequence.first_id, columns=_columns(scores))
