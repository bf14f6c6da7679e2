"""The next step: running sequences one token each, then pieces of prompts, in one mixed batch.

Decides tokens and pages together: every page of the step is counted while it is planned, and none is
taken before all is decided. Running sequences go first; a piece of a prompt shrinks to what is left of
tokens and pages. How a plan becomes a Step is in step_builder.py.
"""

from array import array

from worker.pages.page_cache import Lookup
from worker.scheduling.admission import Admission
from worker.scheduling.books import Books
from worker.scheduling.preemption import choose_victim, preempt
from worker.scheduling.sequence import Place, Sequence
from worker.scheduling.simulated_steps import SimulatedSteps
from worker.scheduling.step import Step
from worker.scheduling.step_builder import Plan, PromptSpan, StepBuilder
from worker.stats import WaitReason

# Of the longest piece, beside running sequences: at least, however long the context, as steps have costs of
# their own; at most, for a piece that leaves its prompt unfinished, the running sequences counted with it: a
# few more steps, each shorter.
LEAST_SHARE, UNFINISHED_SHARE = 1 / 32, 1 / 2
# Of a step's tokens: what several unfinished prompts leave to one in the queue that goes before them.
KEPT_SHARE = 1 / 16


class Planner:
    """Plans one step at a time."""

    def __init__(self, books: Books, admission: Admission) -> None:
        self._books = books
        self._admission = admission
        self._builder = SimulatedSteps(books) if books.is_simulated else StepBuilder(books)
        self.blocked: dict[Sequence, WaitReason] = {}  # looked at in the last step, and why not

    def plan(self, now: float) -> Step | None:
        """The next step with its pages; None: nothing can run before a step in flight is committed."""
        books = self._books
        books.set_clock(books.step_number + 1, now)
        if not self._make_room(now):
            return None
        at_edge = books.batch.at_edge()
        plan = Plan(at_edge, array("H", [sequence.owner for sequence in at_edge]))
        budget = books.config.max_step_tokens - len(books.batch)
        budget = self._continue_prompts(plan, budget)
        budget = self._admit(plan, budget, now)
        self._spend_rest(plan, budget)
        if not plan.spans and not len(books.batch):
            return None
        return self._builder.build(plan)

    # Pages for those who run.
    def _make_room(self, now: float) -> bool:
        """Sees to it that everybody in the batch can go on; False: commit the step in flight first."""
        books = self._books
        while self._num_short() > 0:
            if books.in_flight:
                return False
            books.totals.allocation_failures += 1
            victim = choose_victim(books)
            if victim is not None:
                preempt(books, victim, now)
            else:
                self._give_up_copy()
        return True

    def _give_up_copy(self) -> None:
        """The only one left holds a page just to copy from it: it computes those tokens itself."""
        books = self._books
        sequence = next((s for s in books.prefills if s.copy_source is not None), None)
        assert sequence is not None, f"{books.batch.at_edge()}, {books.prefills} cannot run alone"
        assert sequence.copy_source is not None
        books.discharge(sequence.request, [sequence.copy_source])
        books.cache.release([sequence.copy_source], sequence.owner)
        sequence.copy_source = None
        num_computed = len(sequence.pages) * books.config.page_size
        sequence.request.saved_tokens -= sequence.num_computed - num_computed
        sequence.num_launched = sequence.num_computed = num_computed

    def _num_short(self) -> int:
        books = self._books
        missing = books.batch.num_at_edge - books.cache.num_available
        if missing < 0 or not books.prefills:
            return missing
        return missing + self._first_needs_page()

    def _first_needs_page(self) -> bool:
        """Whether the one that goes before all others is a prompt that cannot go on without a page.

        Everybody else may wait for pages to come back; if the first did, nobody might ever move.
        """
        first = next((s for s in self._books.prefills if s.place == Place.PREFILL), None)
        if first is None or first.num_launched < len(first.pages) * self._books.config.page_size:
            return False
        return all(first.rank < sequence.rank for sequence in self._books.batch.sequences)

    # Prompts.
    def _room(self, plan: Plan) -> int:
        return self._books.cache.num_available - len(plan.owners)

    def _continue_prompts(self, plan: Plan, budget: int) -> int:
        books = self._books
        prompts = [sequence for sequence in books.prefills if sequence.place == Place.PREFILL]
        for number, sequence in enumerate(prompts):
            if budget <= 0 or (plan.spans and self._keeps_rest(sequence, budget)):
                break
            if not sequence.looked_up:
                self._look_up(sequence, plan)
            is_last = number == len(prompts) - 1 and not len(books.queue)
            budget -= self._take_piece(plan, sequence, budget, is_last)
        return budget

    def _keeps_rest(self, sequence: Sequence, budget: int) -> bool:
        """Whether the rest is for the first of the queue, or it waits until one of many prompts is over."""
        queue, kept = self._books.queue, int(self._books.config.max_step_tokens * KEPT_SHARE)
        return len(queue) > 0 and queue[0].rank < sequence.rank and budget <= max(kept, 4)

    def _look_up(self, sequence: Sequence, plan: Plan) -> None:
        """A sample that waited for another one's prompt computes it itself."""
        pages, num_unreferenced = self._admission.need(sequence).lookup
        # Those that nobody refers to come last. Pinned ones are always taken: without them it may never fit.
        num_left = max(0, num_unreferenced - self._room(plan))
        found = Lookup(pages[: len(pages) - num_left], num_unreferenced - num_left)
        self._admission.take_over(sequence, found)

    def _take_piece(self, plan: Plan, sequence: Sequence, budget: int, is_last: bool) -> int:
        """Adds a span of at most ``budget`` tokens; returns its length.

        A piece that leaves its prompt unfinished takes at most three quarters of what is left while
        others wait, so that a short prompt behind long ones starts within a few steps (B040).
        """
        start = sequence.num_launched
        wanted = len(sequence.tokens) - start
        if wanted > budget:
            wanted = budget if is_last else budget - budget // 4
        wanted = min(wanted, self._longest_piece(sequence, start))
        span = PromptSpan(sequence, start, start)
        if not self._extend(plan, span, wanted):
            return 0
        plan.spans.append(span)
        return span.end - span.start

    def _longest_piece(self, sequence: Sequence, start: int) -> int:
        """Most tokens of one prompt in this step, from position `start` on.

        Attention makes late tokens of a long prompt dear: as many as at its beginning would keep the
        sequences beside them waiting. With nobody beside them they may. A prompt of several pieces takes
        many steps in any case, so its first ones need not be the longest of all: with the running sequences
        they make steps of 1,024 tokens where the largest has 2,048, which one CUDA graph holds.
        """
        config, num_running = self._books.config, len(self._books.batch)
        longest = config.max_chunk_tokens or config.max_step_tokens
        if not config.doubling_context or not num_running:
            return longest
        least = max(1, int(longest * LEAST_SHARE))
        share = config.doubling_context / (config.doubling_context + start)
        piece = max(least, int(longest * share))
        if piece < len(sequence.tokens) - start:
            half = min(longest * UNFINISHED_SHARE, config.max_step_tokens * UNFINISHED_SHARE - num_running)
            piece = min(piece, max(least, int(half)))
        return piece

    def _extend(self, plan: Plan, span: PromptSpan, num_tokens: int) -> int:
        """Makes a span longer by at most so many tokens, as far as there are pages; by how many."""
        sequence, page_size = span.sequence, self._books.config.page_size
        num_pages = len(sequence.pages) + plan.claims.get(sequence, 0)
        most = (num_pages + self._room(plan)) * page_size
        end = min(span.end + num_tokens, most)
        if end <= span.end:
            return 0
        needed = max(0, self._books.cache.pages_for(end) - num_pages)
        plan.claim(sequence, needed)
        plan.claims[sequence] = plan.claims.get(sequence, 0) + needed
        gained, span.end = end - span.end, end
        return gained

    def _promise(self, plan: Plan, sequence: Sequence) -> int:
        """Pages that one which was let in will still need for its prompt."""
        if sequence.place == Place.SIBLING:
            return 1
        have = len(sequence.pages) + plan.claims.get(sequence, 0)
        return max(0, self._books.cache.pages_for(sequence.num_final_tokens) - have)

    def _admit(self, plan: Plan, budget: int, now: float) -> int:
        """Lets in whom there is room for, in order; few may pass one that does not fit, and not for ever."""
        books, config = self._books, self._books.config
        self.blocked = {}
        if not len(books.queue):
            return budget
        promised = sum([self._promise(plan, sequence) for sequence in books.prefills])
        at = 0
        while budget > 0 and at < len(books.queue) and len(self.blocked) < config.max_scanned:
            sequence = books.queue[at]
            reason, need = self._admission.why_not(sequence, self._room(plan), promised)
            if reason != WaitReason.NONE or need is None:
                if reason == WaitReason.PAGES and sequence.wait_reason != reason:
                    books.totals.allocation_failures += 1
                if sequence.wait_reason != reason:
                    books.mark(sequence, 0)
                self.blocked[sequence] = sequence.wait_reason = reason
                at += 1
                continue
            if self.blocked:
                if any(passed.skips >= config.max_skips for passed in self.blocked):
                    break
                for passed in self.blocked:
                    passed.skips += 1
            self._admission.admit(sequence, need, now)
            budget -= self._take_piece(plan, sequence, budget, not len(books.queue))
            promised += self._promise(plan, sequence) + need.siblings
        return budget

    def _spend_rest(self, plan: Plan, budget: int) -> None:
        """What nobody else could use goes to the first prompts that are not finished."""
        for span in plan.spans:
            if budget <= 0:
                return
            most = self._longest_piece(span.sequence, span.start) - (span.end - span.start)
            rest = min(len(span.sequence.tokens) - span.end, most)
            if rest > 0:
                budget -= self._extend(plan, span, min(rest, budget))
