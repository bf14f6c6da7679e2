"""What tests/mutations.py plants in the control plane; three kinds of test look for each.

A fault is a replacement of source text that occurs exactly once.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One planted fault. Without `tests` it is one of the control plane."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()


PLANNING, BUILDER, COMMIT, BOOKS = (
    f"worker/scheduling/{name}.py" for name in ("planning", "step_builder", "commit", "books")
)
SHARING = "worker/pages/sharing.py"
POOL, TRIE, CACHE = (f"worker/pages/{name}.py" for name in ("pool", "prefix_trie", "page_cache"))
UNWATCHED, MARKED = "worker/pages/unwatched_pool.py", "worker/pages/marked_prefixes.py"
ADMISSION, PREEMPTION = "worker/scheduling/admission.py", "worker/scheduling/preemption.py"
PINS, OUTBOX, VIEWS = (f"worker/scheduling/{name}.py" for name in ("pins", "outbox", "views"))

CONTROL_PLANE = [
    Fault(
        "computed count kept on preemption",
        "worker/scheduling/sequence.py",
        "self.num_sealed = self.num_computed = self.num_launched = self.num_written = 0",
        "self.num_sealed = self.num_written = 0",
    ),
    Fault(
        "page need rounded down",
        CACHE,
        "return -(-num_tokens // self.config.page_size)",
        "return num_tokens // self.config.page_size",
    ),
    Fault(
        "prefill finished a span early",
        BUILDER,
        "if span.end < len(sequence.tokens):\n                continue",
        "if span.end < len(sequence.tokens) - 1:\n                continue",
    ),
    Fault(
        "pages kept at the end",
        BOOKS,
        "        self.cache.release(pages, owner)\n",
        "        if sequence is None:\n            self.cache.release(pages, owner)\n",
    ),
    Fault(
        "pages kept at an abort under a step in flight",
        BOOKS,
        "            record.dead.add(sequence)\n",
        "            record.dead.add(sequence)\n            return\n",
    ),
    Fault(
        "row never returned",
        BOOKS,
        "            self.rows.give_back(sequence.row, owner)\n",
        "",
    ),
    Fault(
        "row and pages returned under the step in flight (one step early)",
        BOOKS,
        "if self.in_flight and last_step >= self.in_flight[0].step.number:",
        "if False:",
    ),
    Fault(
        "slot offset off by one page",
        BUILDER,
        "        self.indexes.extend(range(first, first + len(pages)))",
        "        self.indexes.extend(range(first + 1, first + 1 + len(pages)))",
    ),
    Fault(
        "partial allocation",
        POOL,
        "        if count > len(self._free):\n            return None",
        "        owners = owners[: len(self._free)]\n        count = len(owners)",
    ),
    Fault(
        "failed allocation leaks what it evicted",
        CACHE,
        "            if num_short > pool.num_cached:\n",
        "            if num_short > pool.num_cached:\n                self._evict(pool.num_cached, owners)\n",
    ),
    Fault(
        "release without its event",
        POOL,
        "        self._change(PageEventKind.RELEASED, pages, self._same(owner, pages), delta=-1)",
        "        for page in pages:\n"
        "            self._num_shared -= self._refs[page] == 2\n"
        "            self._refs[page] -= 1\n"
        "        self._num_references -= len(pages)",
    ),
    Fault(
        "share without its count",
        POOL,
        "self._change(PageEventKind.SHARED, active, self._same(owner, active), delta=1, tag=tag)",
        "self._change(PageEventKind.SHARED, active, self._same(owner, active), tag=tag)",
    ),
    Fault(
        "row's page order differs from the host's list",
        BUILDER,
        "        self.ids.extend(pages)",
        "        self.ids.extend(pages[::-1])",
    ),
    Fault(
        "preempted sequence sent to the back",
        PREEMPTION,
        "    books.requeue(sequence)",
        "    sequence.rank = (sequence.rank[0] + 1e6, sequence.rank[1] + 10**6)\n    books.requeue(sequence)",
    ),
    Fault(
        "oldest chosen as victim",
        PREEMPTION,
        "victim = max(holders, key=lambda sequence: sequence.rank)\n"
        "    return victim if victim.rank > min(sequence.rank for sequence in running) else None",
        "return min(holders, key=lambda sequence: sequence.rank)",
    ),
    Fault(
        "sealed before it was computed",
        COMMIT,
        "first, end = sequence.num_sealed, sequence.computed // size",
        "first, end = sequence.num_sealed, min(len(sequence.tokens) // size, len(pages))",
    ),
    Fault(
        "trie ignores the salt",
        TRIE,
        "above: int | bytes = salt if parent is None else parent",
        'above: int | bytes = b"" if parent is None else parent',
    ),
    Fault(
        "trie ignores the salt on both sides",
        TRIE,
        "        above: int | bytes = salt\n        raw",
        '        above: int | bytes = b""\n        raw',
    ),
    Fault(
        "dummy page handed out",
        "worker/pages/columns.py",
        'self._free = array("i", range((num_pages - 1) * page_size, -1, -page_size))',
        'self._free = array("i", range(num_pages * page_size, -1, -page_size))',
    ),
    Fault(
        "abort lost before admission",
        BOOKS,
        "        if place == Place.QUEUE:\n            self.queue.remove(sequence)\n            return",
        "        if place == Place.QUEUE:\n            return",
    ),
    Fault(
        "duplicate freed, row not re-pointed (H1)",
        COMMIT,
        "        books.repointed.append((sequence, index))\n",
        "",
    ),
    Fault(
        "duplicate freed under the step that reads it (H1, H6)",
        COMMIT,
        "        if books.in_flight:\n            books.hold_until_committed(ours,",
        "        if False:\n            books.hold_until_committed(ours,",
    ),
    Fault(
        "a hit does not refresh recency (H4)",
        CACHE,
        "        self._policy.hold_all(self.pool.share(pages, owner, is_hit))",
        "        self.pool.share(pages, owner, is_hit)",
    ),
    Fault(
        "newest use goes first (H4)",
        "worker/pages/eviction.py",
        "        self._lists.append_all(pages)",
        "        for page in pages[::-1]:\n            self._lists.prepend(page)",
    ),
    Fault(
        "partial allocation by the cache",
        CACHE,
        "            if num_short > pool.num_cached:\n                return None",
        "            if num_short > pool.num_cached:\n"
        "                owners = owners[: pool.num_free + pool.num_cached]\n"
        "                num_short = len(owners) - pool.num_free",
    ),
    Fault(
        "the whole prompt may be hit (M-07)",
        ADMISSION,
        "return (len(sequence.tokens) - 1) // self._books.page_size",
        "return len(sequence.tokens) // self._books.page_size",
    ),
    Fault(
        "last sampled token counted as stored (B023)",
        "worker/scheduling/sequence.py",
        "return len(self.tokens) - 1 if self.state == SequenceState.DECODE else self.num_computed",
        "return len(self.tokens) if self.state == SequenceState.DECODE else self.num_computed",
    ),
    Fault(
        "copy on divergence left out",
        BUILDER,
        "            if sequence.copy_source is not None:\n                copies",
        "            if sequence.copy_source is None and False:\n                copies",
    ),
    Fault(
        "page copied from is given back before the copy",
        BUILDER,
        "        books.hold_until_committed(source, sequence.owner, books.step_number)\n",
        "        books.cache.release([source], sequence.owner)\n",
    ),
    Fault(
        "hits counted as available (B011)",
        ADMISSION,
        "return self.fresh + self.lookup.num_unreferenced",
        "return self.fresh",
    ),
    Fault(
        "a prompt's token of a dead sequence delivered",
        COMMIT,
        "            if sequence in record.dead:\n                continue\n"
        "            if at in result.failed:\n                self._fail(",
        "            if at in result.failed:\n                self._fail(",
    ),
    Fault(
        "token of a dead sequence delivered",
        COMMIT,
        "            if sequence in record.dead:\n                continue\n"
        "            if at in result.failed:\n                failed.append(",
        "            if at in result.failed:\n                failed.append(",
    ),
    Fault(
        "pages of a failed step published (B057)",
        COMMIT,
        "            if at in result.failed:\n                self._fail(",
        "            if at in result.failed:\n"
        "                sequence.num_computed = step.ends[at]\n"
        "                self._seal(sequence)\n"
        "                self._fail(",
    ),
    Fault(
        "context one token too long (B043)",
        ADMISSION,
        "return min(wanted, self._books.config.max_context_tokens)",
        "return min(wanted, self._books.config.max_context_tokens + 1)",
    ),
    Fault("stop before min_tokens", COMMIT, "sequence.num_output > params.min_tokens:", "True:"),
    Fault(
        "max_tokens one short",
        ADMISSION,
        "wanted = len(spec.prompt_token_ids) + spec.params.max_tokens\n",
        "wanted = len(spec.prompt_token_ids) + max(1, spec.params.max_tokens - 1)\n",
    ),
    Fault(
        "inner chunk samples",
        BUILDER,
        "num_decode + at for at, span in enumerate(spans) if span.end == len(span.sequence.tokens)",
        "num_decode + at for at, span in enumerate(spans)",
    ),
    Fault(
        "the first pieces of a long prompt do not count who runs",
        PLANNING,
        "config.max_step_tokens * UNFINISHED_SHARE - num_running",
        "config.max_step_tokens * UNFINISHED_SHARE",
    ),
    Fault(
        "needs no commit before a preemption",
        PLANNING,
        "            if books.in_flight:\n                return False",
        "            if books.in_flight and False:\n                return False",
    ),
    Fault(
        "small requests pass for ever",
        PLANNING,
        "                passed.skips += 1",
        "                passed.skips += 0",
    ),
    Fault(
        "watermark ignored",
        ADMISSION,
        "        head_room = books.config.num_watermark_pages",
        "        head_room = 0",
    ),
    Fault(
        "evicted prefixes forgotten at once",
        TRIE,
        "            marks.append(prints[page])",
        "            pass",
    ),
    Fault(
        "sealed together: what follows a duplicate is left out",
        COMMIT,
        "            left = left[count + 1 :]",
        "            left = left[count + 2 :]",
    ),
    Fault(
        "sealed together: behind a page that was flushed",
        COMMIT,
        " != index + 1 or (index and not is_sealed(own[index - 1])):",
        " != index + 1:",
    ),
    Fault(
        "a kept look-up is taken for that of a changed index",
        ADMISSION,
        "        if version != index.version or known_most != most:",
        "        if version < 0 or known_most != most:",
    ),
    Fault(
        "progress read off the batch is ahead of the device",
        VIEWS,
        "[start - ahead for start in batch.starts]",
        "[start for start in batch.starts]",
    ),
    Fault(
        "samples share the page of the last prompt token",
        COMMIT,
        "        num_shared = last // books.config.page_size\n",
        "        num_shared = -(-last // books.config.page_size)\n",
    ),
    Fault(
        "ring does not claim before it writes",
        "worker/pages/events.py",
        "        self._claimed = number + 1\n",
        "",
    ),
    Fault(
        "timeout of the queue ends what runs",
        "worker/scheduling/scheduler.py",
        "if request is None or (kind == TimerKind.QUEUE and request.admit_time is not None):",
        "if request is None:",
    ),
    Fault(
        "bills: a page's time is not divided when one more shares it",
        SHARING,
        "constants[page] -= now / (count * (count - 1))",
        "constants[page] -= 0.0",
    ),
    Fault(
        "bills: a page that stays shared is divided as before",
        SHARING,
        "constants[page] += self.now / (count * (count + 1))",
        "constants[page] += 0.0",
    ),
    Fault(
        "bills: pages of a running sequence are free of charge",
        BUILDER,
        "sequence.request.account.took(1, now)",
        "now = now",
    ),
    Fault(
        "bills: a page to copy from is paid for ever",
        BUILDER,
        "books.discharge(sequence.request, [source])",
        "sequence.request.gave([source])",
    ),
    Fault(
        "observers are not told of an exchanged page",
        COMMIT,
        "books.mark_pages(sequence, index, [page])",
        "pass",
    ),
    Fault(
        "what-if: a pinned page may be evicted",
        UNWATCHED,
        "            if flag == SEALED:",
        "            if flag:",
    ),
    Fault(
        "what-if: a page stays shared when one holder is left",
        UNWATCHED,
        "            if left:\n                self._num_shared -= 1\n",
        "            if left:\n",
    ),
    Fault(
        "what-if: a page shared again keeps its place among the evictable",
        UNWATCHED,
        "                cached.append(page)\n            else:\n                assert",
        "                pass\n            else:\n                assert",
    ),
    Fault(
        "what-if: an evicted prefix is forgotten one eviction early",
        MARKED,
        "if evictions.get(mark, NO_MARK) < max(forgotten, 0):",
        "if evictions.get(mark, NO_MARK) < max(forgotten + 1, 0):",
    ),
    Fault(
        "what-if: a flushed prefix counts as evicted",
        MARKED,
        "            self._evictions.pop(self._marks[page], None)\n",
        "",
    ),
    Fault(
        "what-if: a page of another sequence with the same prefix is entered twice",
        MARKED,
        "            if mark in known:\n                return marks[:at]\n",
        "",
    ),
    Fault(
        "scores of a step that leaves sequences out stay where they were",
        COMMIT,
        "{new: found.logprobs[at] for new, at in enumerate(kept) if at in found.logprobs}",
        "found.logprobs",
    ),
    Fault(
        "scores beside what was not taken yet",
        OUTBOX,
        "columns.logprobs[first + place] = logprobs[at]",
        "columns.logprobs[place] = logprobs[at]",
    ),
    Fault(
        "a preempted sequence is let in without room for those who run",
        ADMISSION,
        "        if sequence.preemptions:\n            head_room",
        "        if False:\n            head_room",
    ),
    Fault(
        "who waits for pages is looked up again late, though they are there",
        ADMISSION,
        "if not is_alone and room < sequence.blocked_need and",
        "if not is_alone and",
    ),
    Fault(
        "one of several that are passed over counts for all",
        PLANNING,
        "if any(passed.skips >= config.max_skips for passed in self.blocked):",
        "if all(passed.skips >= config.max_skips for passed in self.blocked):",
    ),
    Fault(
        "only those who decode are preempted",
        PREEMPTION,
        "[*books.batch.sequences, *books.prefills]",
        "[*books.batch.sequences]",
    ),
    Fault(
        "pins: what a name stood for counts beside what replaces it",
        PINS,
        "if pin.name != name]",
        "]",
    ),
    Fault(
        "pins: a name that was let go is still told of hits",
        PINS,
        "            names.remove(name)\n",
        "            pass\n",
    ),
    Fault(
        "first in, first out remembers the place of a page that a flush took from its holder",
        CACHE,
        "(self._policy.forget_held if in_use else self._policy.forget)(page)",
        "in_use or self._policy.forget(page)",
    ),
    Fault(
        "pages that enter beside others leave a kept look-up valid",
        TRIE,
        "        self.version += 1\n        marks: list[int] = []\n        for page, above",
        "        marks: list[int] = []\n        for page, above",
    ),
    Fault(
        "a slot of a page that samples share is counted for each",
        VIEWS,
        "found.get(pages[index], free)",
        "free",
    ),
]
