"""Our types → frames of a recording. Planes as in cache.proto. Pure; owns nothing."""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

from kvatlas.v1 import cache_pb2, generation_pb2
from worker.pages.events import EventColumns, PageEventKind
from worker.readers.ledger import Ledger
from worker.readers.recording_file import FORMAT_VERSION
from worker.readers.samples import LoggedEnd, LoggedRequest
from worker.traffic import StepCount

PAGES_PER_FRAME = 65_536
SHARERS_PER_FRAME = 1 << 20  # 6 MiB of the 16 that a frame may have
Frame = cache_pb2.RecordingFrame


class FrameMaker:
    """Makes frames of one worker's life."""

    def __init__(
        self,
        *,
        geometry: cache_pb2.PoolGeometry,
        limits: cache_pb2.SchedulerLimits,
        granularity: int,
        model: str = "",
        version: str = "",
    ) -> None:
        self._geometry = geometry
        self._limits = limits
        self._granularity = granularity
        self._model = model
        self._version = version

    def wall_ns(self, time_us: int) -> int:
        """Unix time of a time since the start of the epoch."""
        return self._geometry.epoch + time_us * 1000

    def revision(self, ledger: Ledger) -> cache_pb2.Revision:
        """Where a ledger stands."""
        return cache_pb2.Revision(epoch=self._geometry.epoch, number=ledger.revision, step=ledger.step)

    def header(
        self, recording_id: str, ledger: Ledger, start_us: int, has_token_ids: bool, note: str
    ) -> Frame:
        """The first frame."""
        header = cache_pb2.RecordingHeader(
            format_version=FORMAT_VERSION,
            version=self._version,
            model=self._model,
            geometry=self._geometry,
            revision=self.revision(ledger),
            has_token_ids=has_token_ids,
            note=note,
            scheduler=self._limits,
            recording_id=recording_id,
            token_granularity=self._granularity,
        )
        header.start_time.FromNanoseconds(self.wall_ns(start_us))
        return Frame(header=header)

    def snapshot(self, ledger: Ledger) -> Iterator[Frame]:
        """The map as of the ledger's revision, and who shares pages."""
        total = len(ledger.states)
        starts = range(0, total, PAGES_PER_FRAME)
        for number, start in enumerate(starts):
            pages = slice(start, min(start + PAGES_PER_FRAME, total))
            chunk = cache_pb2.SnapshotChunk(
                first_page_id=start,
                page_count=pages.stop - start,
                pages=_page_map(ledger, pages),
                chunks_left=len(starts) - number - 1,
            )
            yield Frame(snapshot=chunk)
        page_ids, owners = array("I"), array("H")
        for page, later in sorted(ledger.sharers.items()):
            page_ids.extend((page,) * len(later))
            owners.extend(later)
        for start in range(0, max(1, len(owners)), SHARERS_PER_FRAME):
            part = slice(start, start + SHARERS_PER_FRAME)
            sharers = cache_pb2.PageSharers(page_ids=page_ids[part].tobytes(), owners=owners[part].tobytes())
            yield Frame(sharers=sharers)

    def events(self, events: EventColumns) -> Frame:
        """Consecutive page events, with token ids where the columns have them."""
        steps = np.frombuffer(events.steps, dtype=np.uint64)
        times = np.frombuffer(events.times_us, dtype=np.uint64)
        kinds = np.frombuffer(events.kinds, dtype=np.uint8)
        tags = np.frombuffer(events.tags, dtype=np.uint64)
        sealed = kinds == PageEventKind.SEALED
        batch = cache_pb2.PageEventBatch(
            first_number=events.first_number,
            first_step=int(steps[0]),
            types=events.kinds,
            page_ids=events.pages.tobytes(),
            owners=events.owners.tobytes(),
            ref_counts=events.refs.tobytes(),
            step_offsets=(steps - steps[0]).astype(np.uint32).tobytes(),
            time_offsets_us=(times - times[0]).astype(np.uint32).tobytes(),
            other_page_ids=events.others.tobytes(),
            # Of an event that is no seal: whether a look-up caused it.
            fingerprints=tags.tobytes(),
        )
        batch.first_time.FromNanoseconds(self.wall_ns(int(times[0])))
        if len(events.tokens):
            nothing = bytes(4 * self._geometry.page_size)
            batch.token_ids = b"".join(
                [events.tokens[at] or nothing for at in np.flatnonzero(sealed).tolist()]
            )
        return Frame(events=batch)

    def request(self, request: LoggedRequest, token_ids: Sequence[int] = ()) -> Frame:
        """A request that was accepted."""
        record = cache_pb2.RequestRecord(
            number=request.number,
            request_id=request.request_id,
            sample_count=request.sample_count,
            prompt_tokens=request.num_prompt,
            max_tokens=request.max_tokens,
            priority=request.priority,
            cache_read=request.cache_read,
            cache_write=request.cache_write,
            token_granularity=self._granularity,
            fingerprints=request.keys.tobytes(),
            token_ids=array("I", token_ids).tobytes(),
            sequence_id=request.sequence_id,
        )
        record.time.FromNanoseconds(self.wall_ns(request.time_us))
        return Frame(request=record)

    def sequence(self, end: LoggedEnd, token_ids: Sequence[int] = ()) -> Frame:
        """A sequence that ended."""
        record = cache_pb2.SequenceRecord(
            number=end.number,
            sequence_id=end.sequence_id,
            completion_tokens=end.num_output,
            preemptions=end.preemptions,
            finish_code=end.finish_code,
            queue_us=end.queue_us,
            fingerprints=end.keys.tobytes(),
            token_ids=array("I", token_ids).tobytes(),
        )
        record.time.FromNanoseconds(self.wall_ns(end.time_us))
        if end.prefix is not None:
            hit, cold, evicted, unaligned = end.prefix
            record.prefix.CopyFrom(
                generation_pb2.PrefixLookup(
                    hit_tokens=hit,
                    miss_cold_tokens=cold,
                    miss_evicted_tokens=evicted,
                    unaligned_tokens=unaligned,
                )
            )
        return Frame(sequence=record)

    @staticmethod
    def steps(steps: Sequence[StepCount]) -> Frame:
        """Consecutive steps."""
        batch = cache_pb2.StepBatch(
            steps=array("Q", [step.number for step in steps]).tobytes(),
            durations_us=array("I", [min(int(step.seconds * 1e6), 0xFFFFFFFF) for step in steps]).tobytes(),
            prefill_tokens=array("I", [step.prefill_tokens for step in steps]).tobytes(),
            decode_tokens=array("I", [step.decode_tokens for step in steps]).tobytes(),
            context_tokens=array("Q", [step.context_tokens for step in steps]).tobytes(),
        )
        return Frame(steps=batch)

    @staticmethod
    def gap(after_number: int, lost_events: int, lost_records: int) -> Frame:
        """What is missing."""
        return Frame(
            gap=cache_pb2.RecordingGap(
                after_number=after_number, lost_events=lost_events, lost_records=lost_records
            )
        )


def _page_map(ledger: Ledger, pages: slice) -> cache_pb2.PageMap:
    return cache_pb2.PageMap(
        states=ledger.states[pages].tobytes(),
        flags=ledger.flags_of(pages).tobytes(),
        ref_counts=ledger.refs[pages].tobytes(),
        filled_slots=ledger.filled[pages].tobytes(),
        owners=ledger.owners[pages].tobytes(),
        hit_counts=ledger.hits[pages].tobytes(),
        parent_page_ids=ledger.parents[pages].tobytes(),
        born_ms=ledger.born_ms[pages].tobytes(),
        used_ms=ledger.used_ms[pages].tobytes(),
        fingerprints=ledger.fingerprints[pages].tobytes(),
    )


def state_digest(states: bytes, flags: bytes, ref_counts: bytes) -> bytes:
    """Eight bytes that tell two states of a pool apart."""
    return blake2b(states + flags + ref_counts, digest_size=8).digest()
