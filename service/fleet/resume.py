"""A stream survives its worker: how often a request may be started again, and what a new run carries.

Owns the limits. Each run has new sequence ids, so late tokens of an older one match nothing. Knows no
sockets and no clients.
"""

from dataclasses import dataclass

MAX_RESUMES = 3
MAX_RESUMES_WITHOUT_PROGRESS = 1


@dataclass(slots=True)
class Attempts:
    """Runs of one request. A request that kills its worker must not kill them all."""

    count: int = 0  # of the present run; 0 is the first
    _tokens_before: int = 0  # output tokens when the present run began
    _without_progress: int = 0  # resumes in a row that a run without a token made necessary

    def start_next(self, num_tokens: int) -> bool:
        """Counts one more run of a request with so many output tokens; False when that is one too many."""
        progress = num_tokens > self._tokens_before
        without = 0 if progress else self._without_progress + 1
        if self.count >= MAX_RESUMES or without > MAX_RESUMES_WITHOUT_PROGRESS:
            return False
        self.count += 1
        self._tokens_before, self._without_progress = num_tokens, without
        return True
