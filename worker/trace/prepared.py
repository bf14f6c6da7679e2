"""Requests of a trace as the scheduler takes them, made once for all settings.

Lengths are counted in units of ``resolution`` tokens, and each unit has a mark as its token id.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from worker.ids import SequenceId
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.trace.marks import Marks
from worker.trace.warm_start import cached_prefixes
from worker.trace.workload import Trace, TraceRequest, output_units, prompt_units

STOP_TOKEN = 0xFFFFFFFE
"""Ends a sample before its longest sibling; the last token has no KV, so it may be any."""
_STOPS = frozenset((STOP_TOKEN,))


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request in units, with the marks that stand for its tokens."""

    request: TraceRequest
    spec: RequestSpec
    outputs: Sequence["array[int]"]  # one per sample
    filler: int  # marks from here on are put out by a sample that put out nothing, until it is ended


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is the same for all settings."""

    requests: Sequence[PreparedRequest]  # by arrival
    cached: "Sequence[array[int]]"  # marks of the prefixes that are cached at the beginning, last used last


def prepare(trace: Trace, resolution: int = 1) -> Prepared:
    """All of a trace in units of ``resolution`` tokens. ValueError: keys are not whole units apart."""
    if trace.granularity % resolution:
        text = f"does not divide keys at every {trace.granularity} tokens"
        raise ValueError(f"a resolution of {resolution} tokens {text}")
    keys = [part for request in trace.requests for part in _keys_of(request)]
    marks = Marks(keys, trace.granularity // resolution)
    maker = _Maker(marks, resolution)
    return Prepared(list(map(maker.make, trace.requests)), cached_prefixes(trace, marks))


def _keys_of(request: TraceRequest) -> "list[array[int]]":
    return [request.keys, *[output.keys for output in request.outputs]]


class _Maker:
    """Makes one request after the other, in the order of the marks."""

    def __init__(self, marks: Marks, resolution: int) -> None:
        self._marks = marks
        self._runs = marks.of_each()
        self._resolution = resolution
        self._next_id = 1
        self._params: dict[tuple[int, bool], SamplingParams] = {}

    def make(self, request: TraceRequest) -> PreparedRequest:
        """The next one."""
        first, num_samples = SequenceId(self._next_id), len(request.outputs)
        self._next_id += num_samples
        num_prompt = prompt_units(request, self._resolution)
        lengths = [output_units(request, sample, self._resolution) for sample in range(num_samples)]
        longest = max(1, *lengths)
        whole = self._whole(num_prompt, lengths)
        outputs = [tokens[num_prompt:] for tokens in whole]
        for own in outputs:
            if 0 < len(own) < longest:
                own[-1] = STOP_TOKEN
        spec = RequestSpec(
            first,
            whole[0][:num_prompt],
            self._params_of(longest, num_samples > 1),
            sample_count=num_samples,
            priority=request.priority,
            cache_read=request.cache_read,
            cache_write=request.cache_write,
        )
        filler = self._marks.fresh(longest).start if 0 in lengths else 0
        return PreparedRequest(request, spec, outputs, filler)

    def _whole(self, num_prompt: int, lengths: Sequence[int]) -> "list[array[int]]":
        """Prompt and output of each sample; the prompt of the first is everybody's."""
        prompt, found = next(self._runs), []
        for length in lengths:
            tokens = array("I")
            tokens.frombytes(prompt)
            tokens.frombytes(next(self._runs))
            missing = num_prompt + length - len(tokens)
            if missing > 0:
                tokens.extend(self._marks.fresh(missing))
            elif missing:
                del tokens[missing:]
            found.append(tokens)
        return found

    def _params_of(self, max_tokens: int, may_stop: bool) -> SamplingParams:
        """One object for all requests of the same limit."""
        found = self._params.get((max_tokens, may_stop))
        if found is None:
            stops = _STOPS if may_stop else frozenset[int]()
            found = SamplingParams(max_tokens=max_tokens, stop_token_ids=stops)
            self._params[max_tokens, may_stop] = found
        return found
