"""A peer on the seam that is broken, old or means harm: it costs its own session at most, at both ends."""

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import zmq
from google.protobuf.message import DecodeError, Message

from kvatlas.v1 import generation_pb2
from kvatlas.worker.v1 import worker_pb2
from service.fleet import page_codec
from service.fleet.feed import OutOfStep
from service.fleet.page_mirror import PageMirror
from service.testing import RunningService, running_service
from service.testing_damage import fill, mutated
from service.testing_worker import ScriptedWorker
from worker.link.testing import TestService

ROOT = Path(__file__).resolve().parents[2]
SEED = 51
CALLERS = 8
BUGS = re.compile(r"Traceback|event=(message_broke_link|link_failed|engine_failed|\w+_failed)")


def kinds(message: type[Message], oneof: str) -> list[str]:
    return [each.name for each in message.DESCRIPTOR.oneofs_by_name[oneof].fields]


def hostile(message: Message, oneof: str, kind: str, chance: random.Random) -> bytes:
    """A whole message of one kind with random fields, every other time damaged."""
    part = getattr(message, kind)
    part.SetInParent()
    fill(part, chance)
    data = message.SerializeToString()
    return mutated(data, chance) if chance.random() < 0.5 else data


# Service to worker


class RunningWorker:
    """A worker with the fake runner, in a process of its own."""

    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]") -> None:
        self.address = f"ipc://{folder}/engine"
        self._folder, self.process = folder, process

    @property
    def log(self) -> str:
        return (self._folder / "worker.log").read_text(errors="replace")


@pytest.fixture
def worker(tmp_path: Path, wait_until: Any) -> Iterator[RunningWorker]:
    command = [
        sys.executable,
        "-m",
        "worker",
        "--runner",
        "fake",
        "--model",
        "random:tiny",
        "--metrics-port",
        "-1",
    ]
    command += ["--engine-address", f"ipc://{tmp_path}/engine", "--pages-address", f"ipc://{tmp_path}/pages"]
    command += ["--page-size", "4", "--num-pages", "64", "--max-queued", "64"]
    command += ["--recordings", str(tmp_path / "recordings"), "--profiles", str(tmp_path / "profiles")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "protos")])}
    with (tmp_path / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    made = RunningWorker(tmp_path, process)
    try:
        wait_until(lambda: "event=ready" in made.log or process.poll() is not None, "the worker")
        yield made
    finally:
        process.terminate()
        assert process.wait(60) == 0, made.log


def attack(address: str, num_messages: int, chance: random.Random, honest: TestService) -> None:
    """Says Hello as it should be, and then nothing as it should be; an honest service goes on meanwhile."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.ROUTING_ID, b"attacker")
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.connect(address)
    hello = worker_pb2.Hello(protocol=1, instance_id="attacker", service_epoch=1, version="0")
    names = [*kinds(worker_pb2.ServiceMessage, "kind"), *["add", "command"] * 3]
    commands = kinds(worker_pb2.Command, "command")
    for number in range(num_messages):
        if number % 20 == 0:
            socket.send(worker_pb2.ServiceMessage(hello=hello).SerializeToString())
        message, kind = worker_pb2.ServiceMessage(), names[number % len(names)]
        data = hostile(message, "kind", kind, chance)
        if kind == "add" and number % 2:
            data = hostile_add(number, chance)
        elif kind == "command":
            message.command.ClearField("command")
            data = hostile_command(message, commands[number % len(commands)], chance)
        socket.send(data)
        with suppress(zmq.Again):
            while True:
                socket.recv(zmq.NOBLOCK)
        if number % 200 == 0:
            honest.heartbeat()
            honest.read(0.0)
    socket.send(worker_pb2.ServiceMessage(goodbye=worker_pb2.Goodbye()).SerializeToString())
    socket.close(linger=5000)
    context.term()


def hostile_add(number: int, chance: random.Random) -> bytes:
    """A request that would run, but for what is random in it."""
    prompt = [chance.randrange(200) for _ in range(chance.choice((1, 4, 40)))]
    add = TestService.request(number, prompt, max_tokens=20, samples=chance.choice((1, 1, 3)))
    other = worker_pb2.AddSequence()
    fill(other, chance)
    for descriptor, value in other.ListFields():
        if chance.random() < 0.15:
            add.ClearField(descriptor.name)
            add.MergeFrom(worker_pb2.AddSequence(**{descriptor.name: value}))
    if chance.random() < 0.3:
        params = worker_pb2.SequenceParams()
        fill(params, chance)
        add.params.MergeFrom(params)
    return worker_pb2.ServiceMessage(add=add).SerializeToString()


def hostile_command(message: worker_pb2.ServiceMessage, kind: str, chance: random.Random) -> bytes:
    part = getattr(message.command, kind)
    part.SetInParent()
    fill(part, chance)
    data = message.SerializeToString()
    return mutated(data, chance) if chance.random() < 0.3 else data


def is_idle(beat: worker_pb2.Heartbeat) -> bool:
    return not (beat.load.running_sequences or beat.load.waiting_requests or beat.pool.active_pages)


@pytest.mark.parametrize("num_messages", [1_500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_hostile_service_costs_the_worker_and_its_neighbours_nothing(
    worker: RunningWorker, num_messages: int
) -> None:
    """Others look on meanwhile, so that all it says of itself is told again."""
    honest = TestService(worker.address, "honest")
    try:
        honest.hello(timeout=60)
        honest.subscribe(b"d", b"e")
        honest.command(worker_pb2.Command(start_recording={}), timeout=60)
        before = honest.finish(honest.add([1, 2, 3, 4, 5, 6, 7, 8]), timeout=60)[0].tokens
        attack(worker.address, num_messages, random.Random(SEED), honest)
        after = honest.finish(honest.add([1, 2, 3, 4, 5, 6, 7, 8]), timeout=60)[0].tokens
        assert after == before
        honest.heartbeats.clear()
        honest.wait(lambda: any(map(is_idle, honest.heartbeats[-1:])), timeout=60)
    finally:
        honest.close()
    assert worker.process.poll() is None, worker.log
    found = BUGS.search(worker.log)
    assert found is None, worker.log[max(0, found.start() - 300) : found.start() + 2500]


# Worker to service


class Rogue(ScriptedWorker):
    """Welcomes a service as it should; once `chance` is set, every other message is hostile."""

    chance: random.Random | None = None
    num_hostile = 0

    def _send(self, service: bytes, **kind: Any) -> None:
        [name] = kind
        chance = self.chance
        if chance is None or name == "config" or service not in self._numbers or chance.random() < 0.5:
            super()._send(service, **kind)
            return
        self._numbers[service] += 1
        message = worker_pb2.WorkerMessage(number=self._numbers[service])
        data = hostile(
            message, "kind", chance.choice([*kinds(worker_pb2.WorkerMessage, "kind"), "step"]), chance
        )
        self.num_hostile += 1
        with suppress(zmq.ZMQError):
            self._socket.send_multipart([service, data], zmq.NOBLOCK)


@contextmanager
def served_by_rogue(folder: Path) -> Iterator[tuple[RunningService, Rogue]]:
    """A service with a worker that is as it should be and a rogue one."""
    rogue = Rogue(f"ipc://{folder}/rogue", "rogue").start()
    good = ScriptedWorker(f"ipc://{folder}/good", "good").start()
    try:
        workers = (rogue.address, good.address)
        with running_service(folder, num_workers=0, ready=False, workers=workers) as service:
            yield service, rogue
    finally:
        rogue.stop()
        good.stop()


def code_of(address: str, number: int) -> str:
    stop = {"max_tokens": 5, "ignore_eos": True}
    spec = generation_pb2.GenerationSpec(text=f"prompt {number}", stop=stop, request_id=f"r-{number}")
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/kvatlas.v1.GenerationService/Generate")
        try:
            call(generation_pb2.GenerateRequest(spec=spec).SerializeToString(), timeout=100)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


@pytest.mark.parametrize("num_hostile", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_a_hostile_worker_costs_the_service_its_connection_and_nothing_else(
    tmp_path: Path, wait_until: Any, num_hostile: int, caplog: pytest.LogCaptureFixture
) -> None:
    with served_by_rogue(tmp_path) as (service, rogue):
        pool = service.service.backstage.pool
        wait_until(lambda: len(pool.usable) == 2, "both workers")
        rogue.chance = random.Random(SEED)
        codes, number = set(), 0
        with ThreadPoolExecutor(CALLERS) as callers:
            while rogue.num_hostile < num_hostile:
                codes |= set(callers.map(partial(code_of, service.address), range(number, number + CALLERS)))
                number += CALLERS
        assert codes <= {"OK", "UNAVAILABLE", "ABORTED", "INTERNAL"}, "what a worker says of a request"
        rogue.chance = None
        wait_until(lambda: len(pool.usable) == 2, "the rogue one, now that it is as it should be")
        assert {code_of(service.address, number + each) for each in range(8)} == {"OK"}
        wait_until(lambda: service.is_idle, "everything to be given back")
    told = [record.getMessage() for record in caplog.records]
    # gRPC has one poller for all loops of a process, and tells here of what came late for closed ones.
    ours = "\n".join(text for text in told if "PollerCompletionQueue" not in text)
    assert "Exception in callback" not in ours
    assert "exception was never retrieved" not in ours


# The page feed


def whole_mirror(num_pages: int = 32) -> PageMirror:
    """The copy of a pool of which nothing is used."""
    mirror = PageMirror("worker-0")
    mirror.begin_life(1, num_pages)
    mirror.begin_snapshot()
    reply = worker_pb2.SnapshotReply()
    reply.revision.epoch = 1
    reply.chunk.page_count = num_pages
    for name, kind in page_codec.PLANES.items():
        setattr(reply.chunk.pages, name, bytes(num_pages * int(kind[-1])))
    reply.stats.free_pages = num_pages
    assert mirror.add_part(page_codec.decode_part(reply))
    return mirror


def hostile_feed(chance: random.Random, number: int) -> bytes:
    """A delta that continues what is held, but for what is random in it."""
    feed = worker_pb2.PageFeed()
    if chance.random() < 0.9:
        fill(feed, chance)
    feed.base_number = number
    feed.revision.epoch, feed.revision.number = 1, number + 1
    count = chance.choice((0, 1, 3, 40))
    if chance.random() < 0.8:
        ids = [chance.randrange(chance.choice((32, 33, 1 << 32))) for _ in range(count)]
        feed.delta.page_ids = b"".join(each.to_bytes(4, "little") for each in ids)
        for name, kind in page_codec.PLANES.items():
            setattr(feed.delta.pages, name, chance.randbytes(count * int(kind[-1])))
    if chance.random() < 0.8:
        owners = chance.choice((0, 1, 5))
        feed.delta.progress.owners = chance.randbytes(2 * owners)
        feed.delta.progress.token_counts = chance.randbytes(4 * owners)
    data = feed.SerializeToString()
    return mutated(data, chance) if chance.random() < 0.3 else data


@pytest.mark.parametrize("num_messages", [1_000, pytest.param(30_000, marks=pytest.mark.slow)])
def test_a_hostile_feed_is_refused_or_taken_and_leaves_a_map_of_the_pool(num_messages: int) -> None:
    chance, mirror, num_taken = random.Random(SEED), whole_mirror(), 0
    for _ in range(num_messages):
        data = hostile_feed(chance, mirror.revision.number)
        try:
            num_taken += mirror.apply(page_codec.decode_delta(data))
        except (OutOfStep, ValueError, OverflowError, DecodeError):
            mirror = whole_mirror()  # as a new snapshot makes it
        assert mirror.page_count == 32
        assert all(len(plane) == 32 for plane in mirror.planes.values())
        assert len(mirror.sequences) < 65_536
    assert num_taken > num_messages / 50, "some were taken"
