"""The service process in one object: parts, listeners, health, and the order of the drain.

Owns start and end of everything. No decision about a request is made here.
"""

import asyncio
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_channelz.v1 import channelz
from prometheus_client import CollectorRegistry

from kvatlas.revision import source_revision
from kvatlas.seam_keys import SeamKeyError
from kvatlas.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
)
from service import errors, health
from service.admission import Admission
from service.auth import Authenticator, AuthFileError
from service.config import ConfigError, ServiceConfig
from service.drain import DrainControl
from service.fleet.codec import WorkerFacts
from service.fleet.mirror_metrics import MirrorCollector
from service.fleet.mirrors import PageMirrors
from service.fleet.seam import SeamKeys
from service.fleet.workers import WorkerPool
from service.guard import Guard
from service.handlers.admin import AdminServicer
from service.handlers.backstage import Backstage
from service.handlers.cache import CacheServicer
from service.handlers.generation import GenerationServicer
from service.handlers.info import InfoServicer
from service.handlers.live import LiveCalls
from service.handlers.pins import PinKeeper, Pinner, read_pins
from service.handlers.prompts import Prompts
from service.handlers.tokens import MAX_TEXT_CALLS
from service.health import HealthBoard
from service.health_messages import SERVING
from service.http import OpsServer
from service.metrics import ServiceMetrics
from service.reflection import add_reflection
from service.request import AbortReason
from service.server_options import server_options
from service.telemetry import Telemetry
from service.text.chat import ChatTemplate
from service.text.constraints import ConstraintChecks
from service.text.threads import TextThreads
from service.text.tokenizer import Tokenizer
from service.tls import TlsFiles, server_credentials
from service.unix_sockets import is_served
from service.version import VERSION

if TYPE_CHECKING:
    from service.tracing import Tracing

PUBLIC_SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name,
    server_pb2.DESCRIPTOR.services_by_name["ServerService"].full_name,
)
ADMIN_SERVICES = (
    server_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
    "grpc.channelz.v1.Channelz",
)
ABORT_SECONDS = 1.0  # for handlers to end with a status of their own once they must
ADMIN_SECONDS = 1.0  # for the answer to who asked for the drain
STOP_SECONDS = 2.0  # for their `finally` after that
HEALTH_SECONDS = 0.5

log = logging.getLogger("service.server")


class ListenError(Exception):
    """An address cannot be listened on; the text is for the user."""

    reason = "ADDRESS_UNUSABLE"


class Service:
    """One service process. Made on the event loop; start(), then drain() once, ends everything."""

    def __init__(
        self, config: ServiceConfig, tokenizer: Tokenizer, tokenizer_sha256: str, model_id: str
    ) -> None:
        loop = asyncio.get_running_loop()
        registry = CollectorRegistry()
        metrics = ServiceMetrics(
            registry,
            version=VERSION,
            commit=source_revision(),
            ttft_buckets=config.ttft_buckets,
            itl_buckets=config.itl_buckets,
            e2e_buckets=config.e2e_buckets,
        )
        self._auth = _authenticator(config)
        if self._auth is not None:
            self._auth.on_refused = metrics.auth_reload_failures.inc
        self._auth_task: asyncio.Task[None] | None = None
        self._threads, self._aside = TextThreads(), TextThreads(1)
        self._loop = loop
        self._config = config
        self._sha256 = tokenizer_sha256
        self.backstage = Backstage(
            config=config,
            version=VERSION,
            commit=source_revision(),
            start_time_ns=time.time_ns(),
            pool=WorkerPool(
                config.worker_addresses,
                instance_id=config.instance,
                service_epoch=time.time_ns(),
                version=VERSION,
                model_id=model_id,
                accept=self._accept,
                stall_seconds=config.stall_seconds,
                keys=_seam_keys(config),
                on_seam_failure=lambda reason: metrics.seam_failures[reason].inc(),
            ),
            prompts=Prompts(tokenizer, ChatTemplate.of(tokenizer), self._threads, self._aside),
            metrics=metrics,
            board=HealthBoard(loop),
            admission=Admission(config.max_calls),
            text_calls=Admission(MAX_TEXT_CALLS),
            watches=Admission(config.max_watches),
            live=LiveCalls(),
            constraints=ConstraintChecks.of(tokenizer.vocabulary, tokenizer.size),
            drain=DrainControl(loop, config.grace),
            tracing=_tracing(config),
        )
        self._mirrors = PageMirrors()
        self.backstage.pool.add_listener(self._mirrors)
        registry.register(MirrorCollector(self._mirrors))
        live = self.backstage.live
        metrics.read_at_scrape(queue_tokens=live.unread_tokens, waiting=live.untaken)
        self._pinner = Pinner(self.backstage, self._mirrors)
        pins = read_pins(Path(config.pins)) if config.pins else []
        self._pin_keeper = PinKeeper(self._pinner, self.backstage.pool, self._mirrors, pins)
        self._ops = OpsServer(registry, self._is_ready)
        self._server: grpc.aio.Server | None = None
        self._admin: grpc.aio.Server | None = None
        self._health_timer: asyncio.TimerHandle | None = None
        self.port = 0  # of the public listener
        self.admin_port = 0
        self.metrics_port = 0

    async def start(self) -> None:
        """Connects to the workers and listens. Raises ListenError."""
        config = self._config
        options = server_options(processes=config.processes, behind_balancer=config.behind_balancer)
        log.info("event=options %s", " ".join(f"{name}={value}" for name, value in options))
        self._server = grpc.aio.server(interceptors=self._interceptors(), options=options)
        self._add_services(self._server)
        self.port = _listen(self._server, config.address, config)
        if config.admin_address:
            self._admin = grpc.aio.server(interceptors=self._interceptors(), options=options)
            self._add_admin(self._admin)
            self.admin_port = _listen(self._admin, config.admin_address, config)
        await self._start_ops()
        self.backstage.pool.watch(self._refresh_health)
        self.backstage.pool.watch(self._pin_keeper.look)
        self.backstage.pool.open()
        await self._server.start()
        if self._admin is not None:
            await self._admin.start()
        self.backstage.board.set(health.PROCESS, is_serving=True)
        if self._auth is not None:
            self._auth_task = asyncio.ensure_future(self._auth.keep_up())
        self._tick()
        log.info(
            "event=listening address=%s port=%d metrics_port=%d", config.address, self.port, self.metrics_port
        )

    async def serve(self) -> None:
        """Until a drain is over that nobody has taken back."""
        is_over = False
        while not is_over:
            await self.backstage.drain.wait_until_wanted()
            is_over = await self._drain()

    async def drain(self) -> None:
        """Ends the process's work in order; returns when nothing is left. hurry() shortens it."""
        self.stop()
        await self._drain()

    def stop(self) -> None:
        """Begins the drain, for good."""
        self.backstage.drain.start_for_good()

    async def _drain(self) -> bool:
        """Whether everything has ended: the drain may be taken back."""
        backstage = self.backstage
        log.info("event=drain_started generations=%d", len(backstage.live))
        backstage.board.set_draining(True)
        if not await self._be_patient():
            backstage.board.set_draining(False)
            log.info("event=drain_taken_back")
            return False
        backstage.drain.begin_end()
        await self._end_rest()
        if self._server is not None:
            await self._server.stop(0)
        if self._admin is not None:
            await self._admin.stop(ADMIN_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await backstage.live.wait_until_empty()
        if backstage.tracing is not None:
            await asyncio.to_thread(backstage.tracing.close)
        self._close()
        log.info("event=drained")
        return True

    def hurry(self) -> None:
        """Ends a drain's patience: what still runs is aborted."""
        self.backstage.drain.hurry()

    def hurry_threadsafe(self) -> None:
        """The same from another thread."""
        self._loop.call_soon_threadsafe(self.hurry)

    # Parts

    def _interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """Of one listener: they remember its handlers, and another one must not answer with them."""
        config = self._config
        guard = Guard(
            default_deadline=config.default_deadline,
            max_deadline=config.max_deadline,
            checks=(self._auth.check,) if self._auth is not None else (),
        )
        return [Telemetry(self.backstage.metrics, access_log=config.access_log), guard]

    def _add_services(self, server: grpc.aio.Server) -> None:
        add: Any = generation_pb2_grpc.add_GenerationServiceServicer_to_server
        add(GenerationServicer(self.backstage, self._mirrors), server)
        add = server_pb2_grpc.add_ServerServiceServicer_to_server
        add(InfoServicer(self.backstage), server)
        add = cache_pb2_grpc.add_CacheServiceServicer_to_server
        add(CacheServicer(self.backstage, self._mirrors), server)
        health.add_health(server, self.backstage.board)
        add_reflection(server, PUBLIC_SERVICES)

    def _add_admin(self, server: grpc.aio.Server) -> None:
        add: Any = server_pb2_grpc.add_AdminServiceServicer_to_server
        add(AdminServicer(self.backstage, self._mirrors, self._pinner), server)
        channelz.add_channelz_servicer(server)
        health.add_health(server, self.backstage.board)
        add_reflection(server, ADMIN_SERVICES)

    async def _start_ops(self) -> None:
        if not self._config.metrics_address:
            return
        host, _, port = self._config.metrics_address.rpartition(":")
        try:
            self.metrics_port = await self._ops.start(host.strip("[]"), int(port))
        except OSError as error:
            raise ListenError(f"metrics_address {self._config.metrics_address}: {error.strerror}") from error

    def _accept(self, facts: WorkerFacts) -> str | None:
        """What keeps a worker from being used with this tokenizer."""
        tokenizer = self.backstage.prompts.tokenizer
        if facts.tokenizer_sha256 != self._sha256:
            return f"its tokenizer {facts.tokenizer_sha256[:12]} is not ours, {self._sha256[:12]}"
        if facts.vocab_size < tokenizer.size:
            return f"its vocabulary of {facts.vocab_size} is smaller than the tokenizer's {tokenizer.size}"
        return None

    # Health

    def _is_ready(self) -> bool:
        return self.backstage.board.status(health.GENERATION) == SERVING

    def _refresh_health(self) -> None:
        self.backstage.board.set(health.GENERATION, is_serving=bool(self.backstage.pool.usable))
        self.backstage.board.set(health.CACHE, is_serving=self._mirrors.is_any_fresh)

    def _tick(self) -> None:
        self._refresh_health()
        self._health_timer = self._loop.call_later(HEALTH_SECONDS, self._tick)

    # Drain

    async def _be_patient(self) -> bool:
        """Until nothing runs, the grace is over or somebody hurries; False: the drain was taken back.

        The listener stays: balancers notice by health, callers get DRAINING, no refused connection.
        """
        drain, loop = self.backstage.drain, self._loop
        listen_until = loop.time() + self._config.drain_listen
        idle = asyncio.ensure_future(self.backstage.live.wait_until_empty())
        try:
            while drain.is_wanted and not drain.is_hurried:
                end = listen_until if idle.done() else max(listen_until, drain.deadline)
                if (left := end - loop.time()) <= 0:
                    break
                await drain.wait_for_change(left, idle)
        finally:
            idle.cancel()
        return drain.is_wanted or drain.is_hurried

    async def _idle_within(self, grace: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self.backstage.live.wait_until_empty()

    async def _end_rest(self) -> None:
        """What still runs ends with a status; a handler that is stuck in a write is cancelled."""
        rest = self.backstage.live.everything()
        for call in rest:
            call.fail(errors.draining(call.tokens_sent), AbortReason.OPERATOR)
        if rest:
            log.warning("event=grace_over generations=%d", len(rest))
            await self._idle_within(ABORT_SECONDS)
        for call in self.backstage.live.everything():
            if call.task is not None:
                call.task.cancel()

    def _close(self) -> None:
        if self._health_timer is not None:
            self._health_timer.cancel()
        if self._auth_task is not None:
            self._auth_task.cancel()
        self._pin_keeper.close()
        self._mirrors.close()
        self.backstage.pool.close()
        self._ops.close()
        self._threads.close()
        self._aside.close()
        if self.backstage.constraints is not None:
            self.backstage.constraints.close()
        for address in (self._config.address, self._config.admin_address):
            if address.startswith("unix:"):
                Path(address.removeprefix("unix:")).unlink(missing_ok=True)


def _tracing(config: ServiceConfig) -> "Tracing | None":
    """What sends traces; None without an endpoint, and then OpenTelemetry is not even imported."""
    if not config.otlp_endpoint:
        return None
    try:
        from service.tracing import Tracing
    except ModuleNotFoundError as error:
        raise ConfigError("otlp_endpoint: needs OpenTelemetry: pip install 'kvatlas[tracing]'") from error
    return Tracing(config.otlp_endpoint, ratio=config.trace_ratio, instance=config.instance, version=VERSION)


def _authenticator(config: ServiceConfig) -> Authenticator | None:
    if not config.auth_file:
        return None
    try:
        auth = Authenticator(Path(config.auth_file))
    except AuthFileError as error:
        raise ConfigError(f"auth_file: {error}") from None
    if auth.principals.need_certificates and not config.tls_client_ca:
        raise ConfigError(
            "auth_file: a principal has a certificate (san) and no token, which needs tls_client_ca"
        )
    return auth


def _seam_keys(config: ServiceConfig) -> SeamKeys | None:
    """Keys of tcp seams, None for plaintext. Raises ConfigError."""
    if config.seam_files is None:
        return None
    try:
        return SeamKeys(config.seam_files)
    except SeamKeyError as error:
        raise ConfigError(f"seam_key, seam_peers: {error}") from error


def _credentials(config: ServiceConfig) -> grpc.ServerCredentials | None:
    """TLS of one listener as configured; None: plaintext. Raises ListenError."""
    if not config.tls_certificate:
        return None
    ca = Path(config.tls_client_ca) if config.tls_client_ca else None
    try:
        return server_credentials(TlsFiles(Path(config.tls_certificate), Path(config.tls_key), ca))
    except (OSError, ValueError) as error:
        raise ListenError(f"tls_certificate, tls_key: {error}") from error


def _listen(server: grpc.aio.Server, address: str, config: ServiceConfig) -> int:
    is_unix = address.startswith("unix:")
    credentials = None if is_unix else _credentials(config)
    if is_unix and is_served(address.removeprefix("unix:")):
        raise ListenError(f"address {address} is taken by another server")
    # A socket file is for its owner only, from the moment on that it exists.
    before = os.umask(0o177) if is_unix else None
    try:
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ListenError(f"address {address} cannot be listened on: {error}") from error
    finally:
        if before is not None:
            os.umask(before)
