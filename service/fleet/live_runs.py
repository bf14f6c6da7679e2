"""The runs of one link that have not ended, and who gets what comes for each of their sequences.

Owns the table of live sequences of one life of a worker. Late tokens of a run that was aborted, or resumed
elsewhere, match nothing here. Knows no sockets and no wire format.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from service.fleet.codec import StepColumns
from service.request import (
    NO_TOKEN,
    AddOutcome,
    AddStatus,
    LostReason,
    Run,
    RunReceiver,
    SequenceReceiver,
)


@dataclass(slots=True)
class _LiveRun:
    receiver: RunReceiver
    sequence_ids: set[int]


class LiveRuns:
    """Runs by first sequence id, mailboxes by sequence id."""

    def __init__(self) -> None:
        self._boxes: dict[int, SequenceReceiver] = {}
        self._runs: dict[int, _LiveRun] = {}  # by first sequence id
        self._first_ids: dict[int, int] = {}  # sequence id to its run's

    def __len__(self) -> int:
        """Sequences that have not ended."""
        return len(self._boxes)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._boxes

    def add(self, run: Run, receiver: RunReceiver, boxes: Sequence[SequenceReceiver]) -> None:
        """One more run, a box for each of its samples."""
        assert len(boxes) == run.num_samples, (len(boxes), run.num_samples)
        ids = range(run.sequence_id, run.sequence_id + run.num_samples)
        self._runs[run.sequence_id] = _LiveRun(receiver, set(ids))
        for sequence_id, box in zip(ids, boxes, strict=True):
            self._boxes[sequence_id] = box
            self._first_ids[sequence_id] = run.sequence_id

    def forget(self, sequence_id: int) -> None:
        """Nothing of this sequence is delivered any more; with its last one the run goes."""
        del self._boxes[sequence_id]
        first = self._first_ids.pop(sequence_id)
        run = self._runs[first]
        run.sequence_ids.discard(sequence_id)
        if not run.sequence_ids:
            del self._runs[first]

    def fan_out(self, step: StepColumns) -> None:
        """Delivers what one step did: starts, tokens, ends, in this order. Never waits, never fails."""
        for start in step.starts:
            # After a preemption it is of one sample; before, of a run whose first sample may have ended.
            first = self._first_ids.get(start.sequence_id, start.sequence_id)
            if (run := self._runs.get(first)) is not None:
                run.receiver.started(start)
        for sequence_id, scores in step.prompt_scores:
            if (run := self._runs.get(sequence_id)) is not None:
                run.receiver.prompt_scored(scores)
        if step.scores is not None:
            self._put_scored(step)
        else:
            boxes = self._boxes
            for sequence_id, token_id in zip(step.sequence_ids, step.token_ids, strict=True):
                # Unknown ids are late tokens of sequences that were aborted or resumed elsewhere.
                if (box := boxes.get(sequence_id)) is not None and token_id != NO_TOKEN:
                    box.put(token_id)
        for end in step.ends:
            if (box := self._boxes.get(end.sequence_id)) is not None:
                self.forget(end.sequence_id)
                box.finish(end)

    def _put_scored(self, step: StepColumns) -> None:
        scores = step.scores
        assert scores is not None
        first_alternative = 0
        for entry, (sequence_id, token_id) in enumerate(zip(step.sequence_ids, step.token_ids, strict=True)):
            if (box := self._boxes.get(sequence_id)) is not None and token_id != NO_TOKEN:
                box.put_scored(token_id, scores, entry, first_alternative)
            first_alternative += scores.counts[entry]

    def take_outcome(self, outcome: AddOutcome) -> None:
        """The worker's answer to a run; a run that it did not take is over."""
        run = self._runs.get(outcome.sequence_id)
        if run is None:
            return
        if outcome.status != AddStatus.ACCEPTED:
            for sequence_id in list(run.sequence_ids):
                self.forget(sequence_id)
        run.receiver.added(outcome)

    def lose(self, reason: LostReason) -> None:
        """The worker is gone: nothing is live here any more, and every receiver hears of it once."""
        runs = list(self._runs.values())
        self._boxes.clear()
        self._first_ids.clear()
        self._runs.clear()
        for run in runs:
            run.receiver.lost(reason)
