"""The order of a stream's messages, checked as they come, and the answer gathered from them.

Owns the promises of StreamGenerate on the reader's side: no token is missing, and the last event is
the summary. Shared by the sync and the async stream.
"""

from collections.abc import Iterable

from kvatlas.client.errors import Incomplete
from kvatlas.client.events import (
    Choice,
    Delta,
    Event,
    Finished,
    Generation,
    Logprob,
    Started,
    Summary,
)


class StreamOrder:
    """Checks each event against those before it; raises Incomplete."""

    def __init__(self) -> None:
        self.is_complete = False
        self._token_counts: dict[int, int] = {}

    def begin_behind(self, index: int, num_tokens: int) -> None:
        """The stream goes on behind tokens that came before it."""
        self._token_counts[index] = num_tokens

    def check(self, event: Event) -> None:
        """To be called with every event, in order."""
        if self.is_complete:
            raise Incomplete("a message came after the summary")
        if isinstance(event, Delta):
            seen = self._token_counts.get(event.index, 0)
            if event.token_offset != seen:
                raise Incomplete(
                    f"choice {event.index}: the next token is number {seen}, number {event.token_offset} came"
                )
            self._token_counts[event.index] = seen + event.token_count
        elif isinstance(event, Summary):
            self.is_complete = True

    def end(self) -> None:
        """To be called when the stream ended with status OK."""
        if not self.is_complete:
            raise Incomplete("the stream ended without its summary")


def gather(events: Iterable[Event]) -> Generation:
    """The whole answer from the events of a complete stream."""
    started: Started | None = None
    summary: Summary | None = None
    texts: dict[int, list[str]] = {}
    ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[Logprob]] = {}
    ends: dict[int, Finished] = {}
    for event in events:
        if isinstance(event, Started):
            started = event
        elif isinstance(event, Delta):
            texts.setdefault(event.index, []).append(event.text)
            ids.setdefault(event.index, []).extend(event.token_ids)
            logprobs.setdefault(event.index, []).extend(event.logprobs)
        elif isinstance(event, Finished):
            ends[event.index] = event
        elif isinstance(event, Summary):
            summary = event
    if started is None or summary is None:
        raise Incomplete("the stream has no start, or no summary")
    return Generation(
        request_id=started.request_id,
        model=started.model,
        choices=tuple(
            Choice(
                index=index,
                text="".join(texts.get(index, ())),
                token_ids=tuple(ids.get(index, ())),
                logprobs=tuple(logprobs.get(index, ())),
                finish_reason=end.reason,
                stop_match=end.stop_match,
            )
            for index, end in sorted(ends.items())
        ),
        usage=summary.usage,
        timing=summary.timing,
        seed=started.seed,
        worker_id=started.worker_id,
        prompt_logprobs=summary.prompt_logprobs,
    )
