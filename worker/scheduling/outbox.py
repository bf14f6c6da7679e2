"""What goes to each service: tokens, starts and ends since the last take.

Owns the columns until they are taken. Knows what an entry looks like, not why it is there.
"""

from collections.abc import Mapping, Sequence

from worker.ids import SequenceId
from worker.scheduling.decode_batch import SourceGroup
from worker.scheduling.output import NO_TOKEN, OutputColumns, SequenceEnd, SequenceStart
from worker.scheduling.step import TokenLogprob


class Outbox:
    """Columns by service."""

    def __init__(self) -> None:
        self._columns: dict[str, OutputColumns] = {}

    def of(self, source: str) -> OutputColumns:
        """The columns of a service."""
        found = self._columns.get(source)
        if found is None:
            found = self._columns[source] = OutputColumns()
        return found

    def add_tokens(
        self,
        groups: list[SourceGroup],
        token_ids: Sequence[int],
        codes: bytearray,
        logprobs: Mapping[int, TokenLogprob],
    ) -> None:
        """One token of each sequence of the groups; entry i of the last three belongs to index i."""
        for group in groups:
            columns = self.of(group.source)
            first = len(columns.sequence_ids)
            indexes = group.indexes
            columns.sequence_ids.extend(group.sequence_ids)
            if indexes is None:
                columns.token_ids.extend(token_ids)
                columns.finish_codes.extend(codes)
            else:
                columns.token_ids.extend([token_ids[at] for at in indexes])
                columns.finish_codes.extend([codes[at] for at in indexes])
            if logprobs:
                for place, at in enumerate(range(len(codes)) if indexes is None else indexes):
                    if at in logprobs:
                        columns.logprobs[first + place] = logprobs[at]

    def add_token(
        self, source: str, sequence_id: SequenceId, token_id: int, code: int, logprob: TokenLogprob | None
    ) -> None:
        """One token of one sequence."""
        columns = self.of(source)
        if logprob is not None:
            columns.logprobs[len(columns.sequence_ids)] = logprob
        columns.sequence_ids.append(sequence_id)
        columns.token_ids.append(token_id)
        columns.finish_codes.append(code)

    def add_start(self, source: str, start: SequenceStart) -> None:
        """A request was admitted."""
        self.of(source).starts.append(start)

    def add_end(self, source: str, end: SequenceEnd, with_token: bool) -> None:
        """A sequence ended; ``with_token``: its finish code stands beside its last token already."""
        columns = self.of(source)
        if not with_token:
            columns.sequence_ids.append(end.sequence_id)
            columns.token_ids.append(NO_TOKEN)
            columns.finish_codes.append(end.code)
        columns.ends.append(end)

    def add_prompt_logprobs(
        self, source: str, sequence_id: SequenceId, values: list[TokenLogprob | None]
    ) -> None:
        """The log-probabilities of a whole prompt."""
        self.of(source).prompt_logprobs.append((sequence_id, values))

    def drop(self, source: str) -> None:
        """Forgets what was not taken."""
        self._columns.pop(source, None)

    def take(self, leaving: str | None = None) -> dict[str, OutputColumns]:
        """Everything since the last take but what is of the source `leaving`."""
        taken, self._columns = self._columns, {}
        if leaving in taken:
            self._columns[leaving] = taken.pop(leaving)
        return taken
