"""Steps for what-if: pages are handed out in the same order, but no device runs them and nobody is billed."""

from worker.scheduling.step import PageCopy, RowStart
from worker.scheduling.step_builder import Plan, StepBuilder, TableWrites


class SimulatedSteps(StepBuilder):
    """See StepBuilder. Steps without row starts, page copies and writes to the page table."""

    def _hand_out(self, plan: Plan, writes: TableWrites) -> list[PageCopy]:
        books = self._books
        pages = books.cache.allocate(plan.owners)
        assert pages is not None, f"{len(plan.owners)} pages planned, {books.cache.num_available} available"
        books.repointed.clear()
        for sequence, page in zip(plan.at_edge, pages, strict=False):
            sequence.pages.append(page)
        at = len(plan.at_edge)
        for sequence, count in plan.takers:
            sequence.pages.extend(pages[at : at + count])
            if sequence.copy_source is not None:
                self._copy(sequence, sequence.copy_source, pages[at])
            at += count
        assert at == len(pages), f"{len(pages)} pages allocated, {at} handed out"
        return []

    def _begin_rows(self, plan: Plan, writes: TableWrites) -> list[RowStart]:
        return []
