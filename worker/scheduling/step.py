"""One forward pass: the decision and its outcome. Frozen columns, owns no state.

Columns, not one object per sequence: at 256 running sequences the host has 400 us for a step.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from worker.ids import PageId, Row, SequenceId
from worker.scheduling.sampling import SamplingParams

NO_PAGES = array("i")  # never changed, as no column of a step is
NOTHING: Mapping[int, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RowStart:
    """A sequence enters a row of the page table: everything the runner must know of it.

    Sent once per admission (again after a preemption). The runner writes `token_ids` into the
    token pool and sets up the row's sampling state; later input ids come from the token pool.
    """

    row: Row
    sequence_id: SequenceId
    choice_index: int  # part of the key of the sampling noise
    token_ids: Sequence[int]  # prompt, then output so far (after a preemption or a resume)
    num_prompt_tokens: int  # how many of them are prompt
    params: SamplingParams
    eos_token_ids: frozenset[int]  # empty when EOS does not stop it; masked below min_tokens


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the K and V of one page, all layers, before anything is written in this step."""

    source: PageId
    target: PageId


class Step(NamedTuple):
    """One batch. Spans are sequences' token ranges: decode spans first, then prefill chunks.

    Order on the device: row_starts, page table scatter and page_copies (either first), forward,
    sampling, token pool write. The input ids of span i are token_pool[rows[i], starts[i]:ends[i]]. A
    sampled token of span i is written to token_pool[rows[i], ends[i]], so the next step can be launched
    before this one's result is known.
    """

    number: int
    sequence_ids: Sequence[SequenceId]  # [num_spans]
    rows: "array[int]"  # 'i' [num_spans], no row twice
    starts: "array[int]"  # 'i' [num_spans]: first position computed
    ends: "array[int]"  # 'i' [num_spans]: one past the last
    sampled: Sequence[int]  # indexes of spans whose last position is sampled; every decode span is one
    num_decode: int  # leading spans of exactly one token each
    row_starts: Sequence[RowStart] = ()
    page_copies: Sequence[PageCopy] = ()
    # Page new_page_ids[j] becomes page number new_page_indexes[j] of row new_page_rows[j]: fresh,
    # shared or re-pointed, all are written the same way, by one scatter.
    new_page_rows: "array[int]" = NO_PAGES
    new_page_indexes: "array[int]" = NO_PAGES
    new_page_ids: "array[int]" = NO_PAGES

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return sum(self.ends) - sum(self.starts)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, after penalties and bias but before temperature and filters."""

    logprob: float
    rank: int  # from 1
    alternatives: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


class StepResult(NamedTuple):
    """What the device made of a step."""

    token_ids: Sequence[int]  # [len(step.sampled)], in that order
    logprobs: Mapping[int, TokenLogprob] = NOTHING  # by span index; only who asked
    # By span index: of the prompt tokens at positions start + 1 .. min(end, num_prompt - 1).
    prompt_logprobs: Mapping[int, Sequence[TokenLogprob]] = NOTHING
    failed: Mapping[int, str] = NOTHING  # span index -> why (non-finite logits)
    seconds: float = 0.0  # time on the device
    dead_ends: Collection[int] = ()  # those of `failed` whose constraint left no token
