"""From a plan to a Step: pages taken in one call, rows begun, columns written.

Decides nothing any more. What is in a step counts as in flight from here on.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field

from worker.ids import Owner, PageId
from worker.scheduling.books import Books, InFlight
from worker.scheduling.decode_batch import DecodeSpans
from worker.scheduling.sequence import Place, Sequence
from worker.scheduling.step import PageCopy, RowStart, Step


@dataclass(slots=True)
class PromptSpan:
    """Tokens start .. end - 1 of a prompt (or of what a preempted sequence computes again)."""

    sequence: Sequence
    start: int
    end: int


@dataclass(slots=True)
class Plan:
    """What is decided so far of one step."""

    at_edge: list[Sequence]  # of the batch; the first pages are theirs, one each
    owners: "array[int]"  # one per page to be allocated
    spans: list[PromptSpan] = field(default_factory=list)
    takers: list[tuple[Sequence, int]] = field(default_factory=list)  # of the pages after those
    claims: dict[Sequence, int] = field(default_factory=dict)  # pages per sequence with a prompt

    def claim(self, sequence: Sequence, num_pages: int) -> None:
        """Pages that this sequence gets at the end."""
        if num_pages:
            self.owners.extend((sequence.owner,) * num_pages)
            self.takers.append((sequence, num_pages))


@dataclass(slots=True)
class TableWrites:
    """Columns of Step.new_page_*: pages that become part of a row."""

    rows: "array[int]" = field(default_factory=lambda: array("i"))
    indexes: "array[int]" = field(default_factory=lambda: array("i"))
    ids: "array[int]" = field(default_factory=lambda: array("i"))

    def add(self, sequence: Sequence, first: int) -> None:
        """All pages of a sequence from number ``first`` on."""
        pages = sequence.pages[first:]
        self.rows.extend((sequence.row,) * len(pages))
        self.indexes.extend(range(first, first + len(pages)))
        self.ids.extend(pages)


def row_start(sequence: Sequence) -> RowStart:
    """What the runner must know of a sequence to go on with it, as far as its tokens are committed."""
    return RowStart(
        row=sequence.row,
        sequence_id=sequence.id,
        choice_index=sequence.choice_index,
        token_ids=sequence.tokens[:],
        num_prompt_tokens=sequence.num_prompt,
        params=sequence.request.spec.params,
        eos_token_ids=sequence.eos_ids,
    )


class StepBuilder:
    """Builds one step at a time."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def build(self, plan: Plan) -> Step:
        """Takes the pages, writes the columns, and moves everybody on."""
        books = self._books
        books.step_number += 1
        number = books.step_number
        writes = TableWrites()
        copies = self._hand_out(plan, writes)
        starts = self._begin_rows(plan, writes)
        decodes = books.batch.advance()
        for sequence in decodes.last:
            sequence.last_step = number
        step = self._step(number, plan, decodes, writes, copies, starts)
        books.in_flight.append(InFlight(step, decodes, [span.sequence for span in plan.spans]))
        self._move_on(plan, number)
        return step

    def _hand_out(self, plan: Plan, writes: TableWrites) -> list[PageCopy]:
        """Allocates the pages of the whole step in one call and gives them to their sequences."""
        books = self._books
        num_evicted = max(0, len(plan.owners) - books.cache.pool.num_free)
        pages = books.cache.allocate(plan.owners)
        assert pages is not None, f"{len(plan.owners)} pages planned, {books.cache.num_available} available"
        if num_evicted:
            for owner, count in Counter(plan.owners[-num_evicted:]).items():
                books.by_owner[Owner(owner)].request.evictions_caused += count
        self._write_exchanged(writes)
        self._extend_batch(plan, pages, writes)
        copies = []
        at, now = len(plan.at_edge), books.cache.pool.sharing.now
        for sequence, count in plan.takers:
            taken = pages[at : at + count]
            at += count
            books.mark_pages(sequence, len(sequence.pages), taken)
            sequence.pages.extend(taken)
            sequence.request.took(taken)
            sequence.request.account.took(count, now)
            if sequence.copy_source is not None:
                copies.append(self._copy(sequence, sequence.copy_source, taken[0]))
        assert at == len(pages), f"{len(pages)} pages allocated, {at} handed out"
        return copies

    def _write_exchanged(self, writes: TableWrites) -> None:
        """Rows whose page was found to be a duplicate point at the other one from this step on (H1)."""
        for sequence, index in self._books.repointed:
            if sequence.owner and index < sequence.num_written:
                writes.rows.append(sequence.row)
                writes.indexes.append(index)
                writes.ids.append(sequence.pages[index])
        self._books.repointed.clear()

    def _extend_batch(self, plan: Plan, pages: list[int], writes: TableWrites) -> None:
        """One page for each at an edge; the hot path of a step without prompts."""
        books, first = self._books, len(writes.indexes)
        now = books.cache.pool.sharing.now
        for sequence, page in zip(plan.at_edge, pages, strict=False):
            sequence.request.account.took(1, now)
            index = len(sequence.pages)
            sequence.pages.append(page)
            sequence.num_written = index + 1
            writes.rows.append(sequence.row)
            writes.indexes.append(index)
            writes.ids.append(page)
            if sequence.request.page_counts is not None:
                sequence.request.took([page])
        if books.is_observed:
            count = len(plan.at_edge)
            books.growth.owners.extend(plan.owners[:count])
            books.growth.page_indexes.extend(writes.indexes[first:])
            books.growth.page_ids.extend(pages[:count])

    def _copy(self, sequence: Sequence, source: int, target: int) -> PageCopy:
        """The rest of the prompt comes from the sample that computed it; kept until the copy is made."""
        books = self._books
        sequence.copy_source = None
        books.cache.pool.copied(target, source, sequence.owner)
        sequence.request.copied_pages += 1
        books.discharge(sequence.request, [source])
        books.hold_until_committed(source, sequence.owner, books.step_number)
        return PageCopy(PageId(source), PageId(target))

    def _begin_rows(self, plan: Plan, writes: TableWrites) -> list[RowStart]:
        started = []
        for span in plan.spans:
            sequence = span.sequence
            if not sequence.started:
                sequence.started = True
                started.append(row_start(sequence))
            writes.add(sequence, sequence.num_written)
            sequence.num_written = len(sequence.pages)
        return started

    @staticmethod
    def _step(
        number: int,
        plan: Plan,
        decodes: DecodeSpans,
        writes: TableWrites,
        copies: list[PageCopy],
        started: list[RowStart],
    ) -> Step:
        num_decode = len(decodes.sequences)
        spans = plan.spans
        finished = [num_decode + at for at, span in enumerate(spans) if span.end == len(span.sequence.tokens)]
        return Step(
            number=number,
            sequence_ids=decodes.sequence_ids + [span.sequence.id for span in spans],
            rows=decodes.rows + array("i", [span.sequence.row for span in spans]),
            starts=decodes.starts + array("i", [span.start for span in spans]),
            ends=decodes.ends + array("i", [span.end for span in spans]),
            sampled=[*range(num_decode), *finished] if spans else range(num_decode),
            num_decode=num_decode,
            row_starts=started,
            page_copies=copies,
            new_page_rows=writes.rows,
            new_page_indexes=writes.indexes,
            new_page_ids=writes.ids,
        )

    def _move_on(self, plan: Plan, number: int) -> None:
        """Prompts advance by what is in flight; a finished one decodes from the next step on."""
        books = self._books
        for span in plan.spans:
            sequence = span.sequence
            sequence.num_launched = span.end
            sequence.last_step = number
            if span.end < len(sequence.tokens):
                continue
            books.prefills.remove(sequence)
            if len(sequence.tokens) + 1 < sequence.limit:
                books.batch.add(sequence, len(sequence.tokens))
            else:
                sequence.place = Place.LAST
