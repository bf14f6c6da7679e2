"""ServerService: what this server is and how busy it is, out of what the workers said last."""

import asyncio
from typing import Any

from kvatlas.v1 import server_pb2 as pb
from kvatlas.v1 import server_pb2_grpc
from service import errors
from service.errors import Violation
from service.fleet.link import WorkerLink
from service.fleet.shown import shown
from service.handlers.backstage import Backstage
from service.handlers.convert import to_duration, to_timestamp
from service.handlers.validate import MAX_LOGPROBS, MAX_SAMPLES, Violations, seconds
from service.server_options import MAX_MESSAGE_BYTES
from service.writing import write

MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS, DEFAULT_INTERVAL_SECONDS = 0.1, 60.0, 1.0


class InfoServicer(server_pb2_grpc.ServerServiceServicer):
    """Handlers of ServerService."""

    def __init__(self, backstage: Backstage) -> None:
        self._backstage = backstage
        self._loop = asyncio.get_running_loop()

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        """Version, limits, features and workers, lost ones included."""
        backstage, facts = self._backstage, self._backstage.pool.facts
        return pb.GetServerInfoResponse(
            version=backstage.version,
            git_commit=backstage.commit,
            start_time=to_timestamp(backstage.start_time_ns),
            instance_id=backstage.config.instance,
            limits=self._limits(),
            features=sorted(backstage.features_of(facts)) if facts is not None else (),
            state=self._state(),
            workers=[self._worker(link) for link in shown(backstage.pool.links)],
        )

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        """The served model: there is one, so there is no second page."""
        if request.cursor:
            raise errors.invalid_fields([Violation("cursor", "is of no list here")])
        facts = self._backstage.pool.facts
        return pb.ListModelsResponse(models=[facts.model] if facts is not None else ())

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        """One served model."""
        return pb.GetModelResponse(model=self._backstage.facts_of(request.model_id).model)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        """Load right now."""
        return pb.GetLoadResponse(load=self._load())

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Any) -> None:
        """Load at an interval, until the drain begins. Nothing is made while the reader is late."""
        self._backstage.refuse_if_draining()
        interval = _interval(request)
        permit = self._backstage.watches.enter()
        if permit is None:
            raise errors.watch_limit(self._backstage.config.max_watches)
        try:
            while True:
                await write(context, pb.WatchLoadResponse(load=self._load()))
                if await self._drains_within(interval):
                    raise errors.draining()
        finally:
            permit.release()

    async def _drains_within(self, limit: float) -> bool:
        try:
            async with asyncio.timeout(limit):
                await self._backstage.board.drain_started.wait()
        except TimeoutError:
            return False
        return True

    def _limits(self) -> pb.ServerLimits:
        config, facts = self._backstage.config, self._backstage.pool.facts
        limits = pb.ServerLimits(
            max_request_bytes=MAX_MESSAGE_BYTES,
            max_samples=MAX_SAMPLES,
            max_logprobs=MAX_LOGPROBS,
            default_deadline=to_duration(config.default_deadline),
            max_deadline=to_duration(config.max_deadline),
            max_watches=config.max_watches,
        )
        if facts is not None:
            known = [link.facts for link in self._backstage.pool.known if link.facts is not None]
            limits.max_context_tokens = facts.max_context_tokens
            limits.max_prompt_tokens = self._backstage.max_prompt_tokens(facts)
            limits.max_queued_requests = facts.max_queued_requests
            limits.max_running_sequences = sum(each.max_running_sequences for each in known)
            limits.max_samples = self._backstage.max_samples(facts)
            limits.max_pinned_pages = facts.max_pinned_pages
        return limits

    def _state(self) -> pb.ServerState:
        pool = self._backstage.pool
        if self._backstage.board.is_draining:
            return pb.SERVER_STATE_DRAINING
        if pool.usable:
            return pb.SERVER_STATE_SERVING
        if pool.facts is None or any(link.is_up for link in pool.links):
            return pb.SERVER_STATE_STARTING
        return pb.SERVER_STATE_LOST

    def _worker(self, link: WorkerLink) -> pb.WorkerInfo:
        assert link.facts is not None, "only workers that have introduced themselves are shown"
        info = pb.WorkerInfo()
        info.CopyFrom(link.facts.info)
        info.state = self._backstage.pool.state_of(link)  # type: ignore[assignment]  # the enum's numbers
        age = self._loop.time() - link.beat_time
        info.last_heartbeat_time.GetCurrentTime()
        info.last_heartbeat_time.FromNanoseconds(info.last_heartbeat_time.ToNanoseconds() - int(age * 1e9))
        return info

    def _load(self) -> pb.Load:
        pool, live = self._backstage.pool, self._backstage.live
        load = pb.Load(active_requests=len(live), waiting_requests=live.waiting())
        oldest = 0.0
        for link in shown(pool.links):
            worker = load.workers.add()
            if link.beat is not None:
                worker.CopyFrom(link.beat.load)
                oldest = max(oldest, self._loop.time() - link.beat_time)
            worker.worker_id = link.worker_id
            worker.state = pool.state_of(link)  # type: ignore[assignment]
            # Known from the start; a worker's first beats come before its readers have counted anything.
            if link.facts is not None:
                worker.total_pages = link.facts.page_count - 1
        if (wait_ms := self._backstage.estimated_wait_ms()) is not None:
            load.estimated_wait.CopyFrom(to_duration(wait_ms / 1000))
        load.age.CopyFrom(to_duration(oldest))
        return load


def _interval(request: pb.WatchLoadRequest) -> float:
    if not request.HasField("interval"):
        return DEFAULT_INTERVAL_SECONDS
    found, value = Violations(), seconds(request.interval)
    if not MIN_INTERVAL_SECONDS <= value <= MAX_INTERVAL_SECONDS:
        found.add("interval", f"{value:g} s is not in [{MIN_INTERVAL_SECONDS:g}, {MAX_INTERVAL_SECONDS:g}] s")
        raise errors.invalid_fields(found.found)
    return value
