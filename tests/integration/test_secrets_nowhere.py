"""Everything that a run leaves behind is searched for what must not be there: tokens, texts, salts, labels.

A worker and a service run as processes with everything on that writes: debug logs, access log, spans to a
collector, metrics, a recording. Requests that succeed and requests that fail in every way carry canaries.
"""

import hashlib
import os
import re
import subprocess
import sys
import urllib.request
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from kvatlas.v1 import cache_pb2 as cpb
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import server_pb2 as spb

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("tenant-a", "tenant-b", "operator")
TOKENS = {name: hashlib.sha256(f"token of {name}".encode()).hexdigest() for name in NAMES}
WRONG_TOKEN = hashlib.sha256(b"a token that nobody has").hexdigest()
CANARIES = {
    "prompt": "canary-prompt-Q7",
    "chat": "canary-chat-Q7",
    "salt": "canary-salt-Q7",
    "label": "canary-label-Q7",
    "stop": "canary-stop-Q7",
    "tool": "canary-tool-Q7",
    "schema": "canary-schema-Q7",
    "choice": "canary-choice-Q7",
}
REQUEST_ID = "request-that-logs-may-name"
SCOPES = dict.fromkeys(NAMES, '["generate", "cache.read"]') | {
    "operator": '["generate", "cache.read", "priority", "admin"]'
}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that it gets, as bytes."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Export(self, request: Any, context: Any) -> otlp.ExportTraceServiceResponse:
        self.received.append(request.SerializeToString())
        return otlp.ExportTraceServiceResponse()

    def close(self) -> None:
        self._server.stop(None).wait()


@dataclass
class Run:
    """What ran, and all that it has written."""

    folder: Path
    collector: Collector
    hold: Any  # of the worker's steps
    address: str = ""
    admin: str = ""
    metrics: list[str] = field(default_factory=list)  # urls
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def start(self, name: str, *words: str) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", name, *words, "--log-level", "debug", "--model", "random:tiny"]
            environment = {**os.environ, "PYTHONPATH": path}
            self.processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def call(self, who: str, method: str, request: Any, answer: Any, *, address: str = "") -> Any:
        """The answer, or None and one more of `errors`."""
        token = TOKENS.get(who, who)
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        with grpc.insecure_channel(address or self.address) as channel:
            call = channel.unary_unary(f"/kvatlas.v1.{method}")
            data = request if isinstance(request, bytes) else request.SerializeToString()
            try:
                return answer.FromString(call(data, timeout=60, metadata=metadata))
            except grpc.RpcError as error:
                trailers = [
                    bytes(v, "utf-8") if isinstance(v, str) else v for _, v in error.trailing_metadata()
                ]
                self.errors.append(f"{error!r} {error.details()} {b' '.join(trailers)!r}")
                return None

    def generate(self, who: str, **spec: Any) -> Any:
        stop = {"max_tokens": 3, "ignore_eos": True, **spec.pop("stop", {})}
        labels = {"team": CANARIES["label"]}
        cache = pb.CacheOptions(salt=CANARIES["salt"])
        request = pb.GenerateRequest(spec=pb.GenerationSpec(stop=stop, labels=labels, cache=cache, **spec))
        return self.call(who, "GenerationService/Generate", request, pb.GenerateResponse)

    def scrape(self) -> str:
        text = ""
        for url in self.metrics:
            with urllib.request.urlopen(url, timeout=30) as answer:
                text += answer.read().decode()
        return text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, wait_until: Any, make_hold: Any) -> Iterator[Run]:
    folder, collector = tmp_path_factory.mktemp("secrets"), Collector()
    made = Run(folder, collector, make_hold())
    made.hold.off()
    entries = [
        f'[[principal]]\nname = "{name}"\ntenant = "{name}"\nscopes = {SCOPES[name]}\n'
        f'token_sha256 = ["{hashlib.sha256(TOKENS[name].encode()).hexdigest()}"]\n'
        for name in NAMES
    ]
    auth = folder / "auth.toml"
    auth.touch(mode=0o600)
    auth.write_text("\n".join(entries))
    engine = f"ipc://{folder}/engine"
    worker = ["--runner", "fake", "--metrics-port", "0", "--engine-address", engine]
    worker += ["--pages-address", f"ipc://{folder}/pages", "--recordings", str(folder / "recordings")]
    worker += ["--page-size", "4", "--num-pages", "400", "--max-context", "512", *made.hold.flags]
    service = ["--workers", engine, "--address", "127.0.0.1:0", "--admin-address", f"unix:{folder}/admin"]
    service += ["--metrics-address", "127.0.0.1:0", "--auth-file", str(auth), "--drain-listen", "0"]
    service += ["--otlp-endpoint", f"http://127.0.0.1:{collector.port}", "--grace", "1"]
    made.start("worker", *worker)
    made.start("service", *service)
    try:
        wait_until(lambda: "event=listening" in made.log("worker"), "the worker")
        wait_until(lambda: "event=listening" in made.log("service"), "the service")
        said = dict(re.findall(r"(\w*port)=(\d+)", made.log("service")))
        made.address, made.admin = f"127.0.0.1:{said['port']}", f"unix:{folder}/admin"
        [port] = re.findall(r"event=listening .*metrics_port=(\d+)", made.log("worker"))
        made.metrics = [f"http://127.0.0.1:{each}/metrics" for each in (port, said["metrics_port"])]
        wait_until(lambda: made.generate("operator", text="x") is not None, "a first answer")
        yield made
    finally:
        for process in made.processes[::-1]:
            process.terminate()
            process.wait(30)
        collector.close()


def admin(run: Run, method: str, request: Any, answer: Any) -> Any:
    return run.call("operator", f"AdminService/{method}", request, answer, address=run.admin)


def chat(**more: Any) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=CANARIES["chat"])], **more)


def succeed(run: Run) -> None:
    """Requests of all kinds that are answered."""
    text = f"say {CANARIES['prompt']} please"
    for who in ("tenant-a", "tenant-b"):
        assert run.generate(who, text=text, stop={"stop_strings": [CANARIES["stop"]]}) is not None
        request = pb.TokenizeRequest(text=text)
        assert run.call(who, "GenerationService/Tokenize", request, pb.TokenizeResponse) is not None
    assert run.generate("tenant-a", text=text, request_id=REQUEST_ID) is not None
    assert run.generate("tenant-a", text=text, output={"logprobs": 2}) is not None


def fail(run: Run) -> None:
    """Requests that are refused for every kind of reason, canaries in each."""
    text = f"say {CANARIES['prompt']} please"
    refused = [
        {"text": text, "sampling": {"temperature": 9.0}},
        {"text": text, "stop": {"stop_strings": [CANARIES["stop"] * 60]}},
        {"text": text * 60},  # longer than the context
        {"text": text, "model": "no-such-model"},
        {"text": text, "request_id": f"{CANARIES['prompt']} and a blank"},
        {"text": text, "scheduling": {"priority": 5}},
        {"text": text, "regex": f"({CANARIES['schema']}"},
        {"text": text, "json_schema": '{"type": "' + CANARIES["schema"] + '"}'},
        {"text": text, "choices": {"choices": [CANARIES["choice"], CANARIES["choice"]]}},
        {"chat": chat(tools_json=[CANARIES["tool"]])},
        {"chat": chat(template_args_json=CANARIES["tool"])},
    ]
    before = len(run.errors)
    for spec in refused:
        assert run.generate("tenant-a", **spec) is None, spec
    broken = pb.GenerateRequest(spec=pb.GenerationSpec(text=text)).SerializeToString()[:-2] + b"\xff\xff"
    assert run.call("tenant-a", "GenerationService/Generate", broken, pb.GenerateResponse) is None
    for who in ("", WRONG_TOKEN, f"{TOKENS['tenant-a']} and more"):
        assert run.generate(who, text=text) is None
    assert len(run.errors) == before + len(refused) + 4


def ids_of(run: Run, text: str) -> bytes:
    """Its token ids as they lie in messages and files."""
    said = run.call(
        "operator", "GenerationService/Tokenize", pb.TokenizeRequest(text=text), pb.TokenizeResponse
    )
    ids = list(said.token_ids)[-len(text) :]
    assert len(set(ids)) > 5
    return array("I", ids).tobytes()


def recorded(run: Run, *, include_token_ids: bool) -> bytes:
    """The file of a recording of all that has been."""
    request = spb.StartRecordingRequest(lookback=Duration(seconds=600), include_token_ids=include_token_ids)
    started = admin(run, "StartRecording", request, spb.StartRecordingResponse)
    assert started is not None, run.errors[-1]
    assert run.generate("tenant-a", text=f"recorded {CANARIES['prompt']}") is not None
    stop = spb.StopRecordingRequest(recording_id=started.recording.recording_id)
    assert admin(run, "StopRecording", stop, spb.StopRecordingResponse) is not None
    [path] = (run.folder / "recordings").rglob(f"{started.recording.recording_id}*")
    return path.read_bytes()


def seen_by_others(run: Run) -> bytes:
    """What a tenant with `cache.read` sees of the others."""
    found = b""
    for method, request, answer in (
        ("ListSequences", cpb.ListSequencesRequest(), cpb.ListSequencesResponse),
        ("GetPageMap", cpb.GetPageMapRequest(), cpb.GetPageMapResponse),
        ("GetPage", cpb.GetPageRequest(page_id=3), cpb.GetPageResponse),
    ):
        said = run.call("tenant-b", f"CacheService/{method}", request, answer)
        found += said.SerializeToString() if said is not None else b""
    return found


def test_no_secret_is_in_anything_that_a_run_leaves_behind(run: Run, wait_until: Any) -> None:
    run.errors.clear()
    succeed(run)
    fail(run)
    for said in (REQUEST_ID.encode(), b"PROMPT_TOO_LONG"):
        wait_until(lambda said=said: said in b"".join(run.collector.received), f"a span with {said!r}")
    left = {
        "log of the service": run.log("service").encode(),
        "log of the worker": run.log("worker").encode(),
        "metrics": run.scrape().encode(),
        "spans": b"".join(run.collector.received),
        "errors": "\n".join(run.errors).encode(),
        "recording": recorded(run, include_token_ids=False),
        "command lines": b"".join(Path(f"/proc/{each.pid}/cmdline").read_bytes() for each in run.processes),
        "another tenant's view": seen_by_others(run),
    }
    # The search would find what is there: ids are for logs, principals too, and each source has something.
    assert REQUEST_ID in run.log("service")
    assert b"principal=tenant-a" in left["log of the service"]
    assert all(left.values()), {name: len(data) for name, data in left.items()}
    prompt_ids = {text: ids_of(run, text) for text in CANARIES.values()}
    assert prompt_ids[CANARIES["prompt"]] in recorded(run, include_token_ids=True)

    tokens = [*TOKENS.values(), WRONG_TOKEN]
    digests = [hashlib.sha256(token.encode()).hexdigest() for token in tokens]
    texts = [text for kind, text in CANARIES.items() if kind not in ("schema", "choice", "tool")]
    for name, data in left.items():
        wanted = {secret: secret.encode() for secret in (*tokens, *digests, *texts)}
        wanted |= {f"ids of {text}": ids for text, ids in prompt_ids.items()}
        wanted |= {f"raw {digest}": bytes.fromhex(digest) for digest in digests}
        if name != "errors":  # who sent a schema that does not compile is told where it does not
            wanted |= {text: text.encode() for text in CANARIES.values()}
        assert [what for what, secret in wanted.items() if secret in data] == [], name


def test_labels_and_names_of_others_are_for_the_operator_alone(run: Run, wait_until: Any) -> None:
    """The counterpart: labels do reach the server, and the scope `admin` sees them."""
    run.hold.on()
    token = TOKENS["tenant-a"]
    spec = pb.GenerationSpec(text="x", stop={"max_tokens": 400, "ignore_eos": True}, request_id="held-1")
    spec.labels["team"] = CANARIES["label"]
    with grpc.insecure_channel(run.address) as channel:
        stream = channel.unary_stream("/kvatlas.v1.GenerationService/StreamGenerate")(
            pb.StreamGenerateRequest(spec=spec).SerializeToString(),
            timeout=100,
            metadata=(("authorization", f"Bearer {token}"),),
        )
        next(iter(stream))

        def shown(who: str) -> bytes:
            request = cpb.ListSequencesRequest()
            said = run.call(who, "CacheService/ListSequences", request, cpb.ListSequencesResponse)
            return bytes(said.SerializeToString())

        wait_until(lambda: b"held-1" in shown("tenant-a"), "the sequence")
        assert CANARIES["label"].encode() in shown("operator")
        assert b"held-1" in shown("operator")
        assert not any(
            word in shown("tenant-b") for word in (b"held-1", CANARIES["label"].encode(), b"tenant-a")
        )
        stream.cancel()
    run.hold.off()


def test_the_config_that_is_printed_holds_no_secret(run: Run) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    words = ["--auth-file", str(run.folder / "auth.toml"), "--print-config"]
    done = subprocess.run(
        [sys.executable, "-m", "service", *words],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert "auth_file" in done.stdout
    assert not any(hashlib.sha256(token.encode()).hexdigest() in done.stdout for token in TOKENS.values())
