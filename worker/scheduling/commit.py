"""What follows from the outcome of a step: tokens appended, full pages sealed, sequences ended.

Knows what may be kept of a step: nothing of a sequence that ended meanwhile or failed in it.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Column
from dataclasses import dataclass

from worker.scheduling.books import Books, InFlight
from worker.scheduling.decode_batch import DecodeSpans, SourceGroup, group_by_source
from worker.scheduling.output import FailureReason, FinishCode
from worker.scheduling.sequence import Place, Sequence
from worker.scheduling.step import StepResult, TokenLogprob
from worker.stats import SequenceState


@dataclass(slots=True)
class _Kept:
    """The decode spans whose tokens count; entry i of the first three belongs together."""

    sequences: list[Sequence]
    appends: list[Callable[[int], None]]
    tokens: Column[int]
    groups: list[SourceGroup]
    logprobs: Mapping[int, TokenLogprob]  # by entry


class Committer:
    """Applies results in the order of their steps."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._cache = books.cache
        self._page_size = books.config.page_size
        self._has_index = books.config.cache.sharing

    def commit(
        self, record: InFlight, result: StepResult, on_first_tokens: Callable[[], None] = lambda: None
    ) -> None:
        """The step of ``record``, the oldest in flight and taken out of there, is over."""
        step = record.step
        assert len(result.token_ids) == len(step.sampled), (
            f"step {step.number}: {len(step.sampled)} tokens expected, {len(result.token_ids)} came"
        )
        # First what only waited for this step: a page copied from goes back before those above it,
        # which its holder may release below (eviction.py relies on children first).
        self._books.release_held(step.number)
        self._commit_decodes(record, result)
        if record.prefills:
            self._commit_prompts(record, result, on_first_tokens)

    # One token each.
    def _commit_decodes(self, record: InFlight, result: StepResult) -> None:
        num_decode, spans = record.step.num_decode, record.decodes
        if not num_decode:
            return
        tokens = result.token_ids if len(result.token_ids) == num_decode else result.token_ids[:num_decode]
        kept = _Kept(spans.sequences, spans.appends, tokens, spans.groups, result.logprobs)
        failed: list[tuple[Sequence, int]] = []
        if record.dead or result.failed:
            kept, failed = self._leave_out(record, result, kept)
        for append, token_id in zip(kept.appends, kept.tokens, strict=True):
            append(token_id)
        self._books.totals.output_tokens += len(kept.tokens)
        codes = bytearray(len(kept.tokens))
        ended: list[tuple[FinishCode, Sequence]] = []
        if spans.last or not spans.stop_ids.isdisjoint(kept.tokens):
            ended = self._find_ends(kept, spans, codes)
        self._books.outbox.add_tokens(kept.groups, kept.tokens, codes, kept.logprobs)
        self._seal_full(spans.filling, record, failed)
        for code, sequence in ended:
            self._books.end(sequence, code, with_token=True)
        for sequence, span in failed:
            self._fail(sequence, result, span)

    @staticmethod
    def _leave_out(
        record: InFlight, result: StepResult, found: "_Kept"
    ) -> tuple["_Kept", list[tuple[Sequence, int]]]:
        """Without the tokens of sequences that ended since the launch; who failed in this step, by span."""
        kept, failed = [], []
        for at, sequence in enumerate(found.sequences):
            if sequence in record.dead:
                continue
            if at in result.failed:
                failed.append((sequence, at))
            else:
                kept.append(at)
        sequences = [found.sequences[at] for at in kept]
        return (
            _Kept(
                sequences,
                [found.appends[at] for at in kept],
                [found.tokens[at] for at in kept],
                group_by_source(sequences),
                {new: found.logprobs[at] for new, at in enumerate(kept) if at in found.logprobs},
            ),
            failed,
        )

    def _find_ends(
        self, kept: _Kept, spans: DecodeSpans, codes: bytearray
    ) -> list[tuple[FinishCode, Sequence]]:
        """Who ends with this token, in order, and why; writes the codes."""
        sequences, tokens = kept.sequences, kept.tokens
        if sequences is spans.sequences and spans.stop_ids.isdisjoint(tokens):
            places = sorted(spans.last_at)
        else:
            at_limit, stop_ids = set(spans.last), spans.stop_ids
            places = [
                at
                for at, (sequence, token_id) in enumerate(zip(sequences, tokens, strict=True))
                if token_id in stop_ids or sequence in at_limit
            ]
        ended = []
        for at in places:
            code = self._finish_code(sequences[at], tokens[at])
            if code:
                codes[at] = code
                ended.append((code, sequences[at]))
        return ended

    @staticmethod
    def _finish_code(sequence: Sequence, token_id: int) -> FinishCode:
        """Whether the token that was just appended is the last, and why."""
        params = sequence.request.spec.params
        if token_id in sequence.stop_ids and sequence.num_output > params.min_tokens:
            return FinishCode.EOS if token_id in sequence.eos_ids else FinishCode.STOP_TOKEN
        if len(sequence.tokens) >= sequence.limit:
            by_count = sequence.num_output >= params.max_tokens
            return FinishCode.MAX_TOKENS if by_count else FinishCode.CONTEXT_LENGTH
        return FinishCode.NONE

    def _seal_full(
        self, sequences: list[Sequence], record: InFlight, failed: list[tuple[Sequence, int]]
    ) -> None:
        if record.dead or failed:
            gone = record.dead.union([sequence for sequence, _ in failed])
            sequences = [sequence for sequence in sequences if sequence not in gone]
        if not self._has_index:
            return
        left = [sequence for sequence in sequences if sequence.can_seal]
        while left:
            count = self._seal_each(left)
            if count < len(left):
                self._seal(left[count])
            left = left[count + 1 :]

    # Prompts.
    def _commit_prompts(
        self, record: InFlight, result: StepResult, on_first_tokens: Callable[[], None]
    ) -> None:
        """First tokens first, where a service is told nothing else: sealing takes longer than they do."""
        step = record.step
        num_decode, sampled = step.num_decode, step.sampled
        tokens = dict(zip(sampled[num_decode:], result.token_ids[num_decode:], strict=True))  # by span
        pieces: list[tuple[int, Sequence]] = []
        early: set[int] = set()
        for at, sequence in enumerate(record.prefills, num_decode):
            if sequence in record.dead:
                continue
            if at in result.failed:
                self._fail(sequence, result, at)
                continue
            self._books.totals.prompt_tokens_computed += step.ends[at] - step.starts[at]
            sequence.num_computed = step.ends[at]
            pieces.append((at, sequence))
            if at in tokens and _goes_on_alone(sequence, tokens[at]):
                self._first_token(sequence, tokens[at], result, at)
                early.add(at)
        if early:
            on_first_tokens()
        for at, sequence in pieces:
            self._commit_piece(sequence, step.starts[at], step.ends[at], result, at)
            if at in tokens and at not in early:
                self._first_token(sequence, tokens[at], result, at)

    def _commit_piece(self, sequence: Sequence, start: int, end: int, result: StepResult, at: int) -> None:
        request = sequence.request
        self._seal(sequence)
        if request.spec.params.prompt_logprobs is not None and not request.prompt_logprobs_sent:
            self._add_prompt_logprobs(sequence, start, result, at)
        if request.leader is sequence and end >= sequence.num_prompt:
            request.leader = None
            if len(request.samples) > 1:
                self._fork(sequence)

    def _add_prompt_logprobs(self, sequence: Sequence, start: int, result: StepResult, at: int) -> None:
        """Keeps what follows on what is there: after a preemption positions come again (B038)."""
        request = sequence.request
        known = request.prompt_logprobs
        if not known:
            known.append(None)
        fresh = result.prompt_logprobs.get(at, ())
        if start < len(known):
            known.extend(fresh[len(known) - start - 1 :])
        if len(known) >= sequence.num_prompt:
            request.prompt_logprobs_sent = True
            self._books.outbox.add_prompt_logprobs(
                request.spec.source, request.samples[0].id, request.prompt_logprobs
            )
            request.prompt_logprobs = []

    def _fork(self, leader: Sequence) -> None:
        """The samples that waited share the whole pages before the last prompt token.

        The page with that token is theirs alone: the other prompt tokens in it are copied, the last is
        computed by each sample, for its own logits.
        """
        books, request = self._books, leader.request
        last = leader.num_prompt - 1
        num_shared = last // books.config.page_size
        for sample in request.samples:
            if sample.place != Place.SIBLING:
                continue
            sample.place = Place.PREFILL
            sample.looked_up = True
            books.take_pages(sample, leader.pages[:num_shared], is_hit=False)
            request.saved_tokens += last
            sample.num_sealed = min(leader.num_sealed, num_shared)
            sample.can_seal = leader.can_seal
            sample.num_computed = sample.num_launched = last
            if last % books.config.page_size:
                source = leader.pages[num_shared]
                books.cache.acquire([source], sample.owner, is_hit=False)
                books.charge(request, [source])
                sample.copy_source = source

    def _first_token(self, sequence: Sequence, token_id: int, result: StepResult, at: int) -> None:
        """The prompt is computed, and the next token came with it."""
        books = self._books
        sequence.append(token_id)
        sequence.state = SequenceState.DECODE
        books.mark(sequence, len(sequence.pages))
        books.totals.output_tokens += 1
        code = self._finish_code(sequence, token_id)
        source = sequence.request.spec.source
        books.outbox.add_token(source, sequence.id, token_id, code, result.logprobs.get(at))
        if code:
            books.end(sequence, code, with_token=True)

    def _fail(self, sequence: Sequence, result: StepResult, span: int) -> None:
        is_dead_end = span in result.dead_ends
        reason = FailureReason.CONSTRAINT_DEAD_END if is_dead_end else FailureReason.INTERNAL
        self._books.end(sequence, FinishCode.FAILED, failure=reason, message=result.failed[span])

    # Pages.
    def _seal_each(self, sequences: list[Sequence]) -> int:
        """``_seal`` in one call of those that filled a page, up to the first that is not new; how many."""
        size, is_sealed = self._page_size, self._cache.pool.is_sealed
        pages: list[int] = []
        aboves: list[int | bytes] = []
        raws: list[bytes] = []
        for sequence in sequences:
            index, own, tokens = sequence.num_sealed, sequence.pages, sequence.tokens
            # One page and no more, behind one that was not flushed.
            if (len(tokens) - 1) // size != index + 1 or (index and not is_sealed(own[index - 1])):
                break
            pages.append(own[index])
            aboves.append(own[index - 1] if index else sequence.request.spec.cache_salt)
            raws.append(tokens[index * size : (index + 1) * size].tobytes())
        owners = [sequence.owner for sequence in sequences[: len(pages)]]
        count = self._cache.seal_each(pages, aboves, owners, raws) if pages else 0
        for sequence in sequences[:count]:
            sequence.num_sealed += 1
        return count

    def _seal(self, sequence: Sequence) -> None:
        """Full, computed and committed pages enter the prefix index, in order."""
        if not sequence.can_seal or not self._has_index:
            return
        cache, size, pages = self._cache, self._page_size, sequence.pages
        first, end = sequence.num_sealed, sequence.computed // size
        salt = sequence.request.spec.cache_salt
        while first < end:
            parent = pages[first - 1] if first else None
            if parent is not None and not cache.pool.is_sealed(parent):
                sequence.can_seal = False  # a flush took the page before it out of the index
                return
            raw = sequence.tokens[first * size : end * size].tobytes()
            first += cache.seal_run(pages[first:end], parent, salt, raw, sequence.owner)
            if first < end:
                self._exchange(sequence, first, salt)
                first += 1
            sequence.num_sealed = first

    def _exchange(self, sequence: Sequence, index: int, salt: bytes) -> None:
        """The next page of a sequence is held by another, which takes its place."""
        size, pages = self._page_size, sequence.pages
        parent = pages[index - 1] if index else None
        token_bytes = sequence.tokens[index * size : (index + 1) * size].tobytes()
        kept = self._cache.seal(pages[index], parent, salt, token_bytes, sequence.owner)
        assert kept != pages[index], f"page {kept} was held a moment ago"
        self._repoint(sequence, index, kept)

    def _repoint(self, sequence: Sequence, index: int, page: int) -> None:
        """The same tokens are cached in another page: the row points there before ours is freed (H1)."""
        books = self._books
        ours = sequence.pages[index]
        books.cache.acquire([page], sequence.owner, is_hit=False)
        sequence.pages[index] = page
        books.repointed.append((sequence, index))
        books.mark_pages(sequence, index, [page])
        books.charge(sequence.request, [page])
        books.discharge(sequence.request, [ours])
        if books.in_flight:
            books.hold_until_committed(ours, sequence.owner, books.in_flight[-1].step.number)
        else:
            books.cache.release([ours], sequence.owner)


def _goes_on_alone(sequence: Sequence, token_id: int) -> bool:
    """Whether its first token ends nothing, and neither samples nor scores of the prompt go before it."""
    request = sequence.request
    ends = token_id in sequence.stop_ids or len(sequence.tokens) + 1 >= sequence.limit
    return not ends and len(request.samples) == 1 and request.spec.params.prompt_logprobs is None
