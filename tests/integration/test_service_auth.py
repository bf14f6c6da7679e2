"""A service with an auth file, plain and with mTLS, over a real worker: who may what, what is never shown."""

import hashlib
import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from dashboard.client import ServiceSource
from kvatlas.client.errors import KvatlasError
from kvatlas.free_ports import free_ports
from kvatlas.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
)

ROOT = Path(__file__).resolve().parents[2]
BUF = shutil.which("buf", path=str(Path(sys.executable).parent)) or ""
PAGE_SIZE, NUM_PAGES = 4, 1000
CALL_SECONDS = 120.0  # ends a call that hangs
PROMPT = "the same words for all tenants, over and over"
TOKENS = {name: f"{name}-4f1d0c9be2" for name in ("team-a", "team-b", "looker", "operator", "stranger")}
SCOPES = {
    "team-a": '["generate", "cache.read"]',
    "team-b": '["generate", "cache.read", "priority"]',
    "looker": '["cache.read"]',
    "operator": '["generate", "cache.read", "priority", "admin"]',
}


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def auth_text(tokens: dict[str, str]) -> str:
    entries = [
        f'[[principal]]\nname = "{name}"\ntenant = "{name}"\nscopes = {SCOPES[name]}\n'
        f'token_sha256 = ["{digest(token)}"]\nmax_active_requests = 3\n'
        + ('san = ["dns:team-a.test"]\n' if name == "team-a" else "")
        for name, token in tokens.items()
    ]
    return "\n".join(entries)


def write_private(path: Path, text: str) -> None:
    aside = path.with_suffix(".new")
    aside.touch(mode=0o600)
    aside.write_text(text)
    aside.replace(path)


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)


def make_certificate(folder: Path, name: str, host: str, ca: str = "ca") -> None:
    """name.pem and name.key, signed by the test's authority, for one DNS name and the loopback."""
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(folder, "req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={host}")
    (folder / f"{name}.ext").write_text(f"subjectAltName=DNS:{host},IP:127.0.0.1\n")
    signer = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", "2")
    openssl(
        folder,
        "x509",
        "-req",
        "-in",
        f"{name}.csr",
        *signer,
        "-extfile",
        f"{name}.ext",
        "-out",
        f"{name}.pem",
    )


def make_authority(folder: Path, name: str = "ca") -> None:
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(folder, "req", "-x509", *curve, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}")  # fmt: skip # noqa: E501


@dataclass
class Deployment:
    """One worker; services in plaintext, with mTLS and with TLS; all with the same auth file."""

    folder: Path
    hold: Any  # on while a test looks at what runs
    plain: str = ""
    secure: str = ""  # asks for certificates
    secure_admin: str = ""  # the same service's other listener
    tls: str = ""  # asks for tokens
    metrics: str = ""

    @property
    def auth_file(self) -> Path:
        return self.folder / "auth.toml"

    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.folder.glob("*.log"))

    def start(self, name: str, *words: str) -> "subprocess.Popen[bytes]":
        path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *words], env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        self.hold.on()
        try:
            yield
        finally:
            self.hold.off()

    @contextmanager
    def client(self, name: str) -> Iterator["Client"]:
        with grpc.insecure_channel(self.plain) as channel:
            yield Client(channel, TOKENS.get(name, name))

    @contextmanager
    def secure_client(self, certificate: str, token: str = "", address: str = "") -> Iterator["Client"]:
        read = self.folder.joinpath
        pair = (read(f"{certificate}.key"), read(f"{certificate}.pem")) if certificate else ()
        key, chain = (path.read_bytes() for path in pair) if pair else (None, None)
        credentials = grpc.ssl_channel_credentials(read("ca.pem").read_bytes(), key, chain)
        with grpc.secure_channel(address or self.secure, credentials) as channel:
            yield Client(channel, token)


class Client:
    """Stubs that say who calls."""

    def __init__(self, channel: grpc.Channel, token: str) -> None:
        self.channel = channel
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self.cache: Any = cache_pb2_grpc.CacheServiceStub(channel)
        self.server: Any = server_pb2_grpc.ServerServiceStub(channel)
        self.admin: Any = server_pb2_grpc.AdminServiceStub(channel)

    def generate(self, text: str = PROMPT, tokens: int = 2, priority: int = 0) -> Any:
        spec = generation_pb2.GenerationSpec(text=text, stop={"max_tokens": tokens, "ignore_eos": True})
        if priority:
            spec.scheduling.priority = priority
        request = generation_pb2.GenerateRequest(spec=spec)
        return self.generation.Generate(request, timeout=CALL_SECONDS, metadata=self.metadata)

    def stream(self, request_id: str) -> Any:
        spec = generation_pb2.GenerationSpec(text=PROMPT, stop={"max_tokens": 700, "ignore_eos": True})
        spec.request_id = request_id
        request = generation_pb2.StreamGenerateRequest(spec=spec)
        return self.generation.StreamGenerate(request, timeout=CALL_SECONDS, metadata=self.metadata)

    def look(self) -> Any:
        return self.cache.GetPagePool(
            cache_pb2.GetPagePoolRequest(), timeout=CALL_SECONDS, metadata=self.metadata
        )

    def sequences(self) -> Any:
        request = cache_pb2.ListSequencesRequest()
        return self.cache.ListSequences(request, timeout=CALL_SECONDS, metadata=self.metadata).sequences

    def checked(self) -> Any:
        return self.channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=CALL_SECONDS)

    def info(self) -> Any:
        return self.server.GetServerInfo(
            server_pb2.GetServerInfoRequest(), timeout=CALL_SECONDS, metadata=self.metadata
        )


@pytest.fixture(scope="module")
def deployment(
    tmp_path_factory: pytest.TempPathFactory, wait_until: Any, make_hold: Any
) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("auth"), make_hold())
    made.hold.off()
    folder = made.folder
    make_authority(folder)
    make_certificate(folder, "server", "localhost")
    make_certificate(folder, "team-a", "team-a.test")
    make_certificate(folder, "unknown", "unknown.test")
    write_private(made.auth_file, auth_text({name: TOKENS[name] for name in SCOPES}))
    engine = f"ipc://{folder}/engine"
    worker = ["worker", "--runner", "fake", "--model", "random:tiny", "--metrics-port", "-1"]
    worker += ["--page-size", str(PAGE_SIZE), "--num-pages", str(NUM_PAGES), *made.hold.flags]
    worker += ["--engine-address", engine, "--pages-address", f"ipc://{folder}/pages"]
    service = ["service", "--model", "random:tiny", "--workers", engine, "--address", "127.0.0.1:0"]
    service += ["--auth-file", str(made.auth_file), "--drain-listen", "0", "--grace", "1"]
    tls = ["--tls-certificate", f"{folder}/server.pem", "--tls-key", f"{folder}/server.key"]
    tls += ["--tls-client-ca", f"{folder}/ca.pem", "--metrics-address", "", "--instance-id", "secure"]
    made.secure_admin = f"127.0.0.1:{free_ports(1)[0]}"
    processes = [
        made.start("worker", *worker),
        made.start("plain", *service, "--metrics-address", "127.0.0.1:0"),
        made.start("secure", *service, *tls, "--admin-address", made.secure_admin),
        made.start("tls", *service, *tls[:4], "--metrics-address", "", "--instance-id", "tls"),
    ]
    try:
        wait_until(lambda: made.log().count("event=listening address=") == 3, "the services")
        made.plain, made.metrics = listening(folder / "plain.log")
        made.secure, _ = listening(folder / "secure.log")
        made.tls, _ = listening(folder / "tls.log")
        with made.client("operator") as client:
            wait_until(lambda: not refusal(client.look) and not refusal(client.generate), "a map")
        yield made
    finally:
        for process in processes[::-1]:
            process.terminate()
            process.wait(CALL_SECONDS)


def listening(log: Path) -> tuple[str, str]:
    found = re.search(r"event=listening address=\S+ port=(\d+) metrics_port=(\d+)", log.read_text())
    assert found is not None
    return f"127.0.0.1:{found[1]}", f"http://127.0.0.1:{found[2]}/metrics"


def refusal(call: Callable[[], object]) -> str:
    """Status, reason and scope of a call that fails; "" for one that does not."""
    try:
        call()
    except grpc.RpcError as error:
        status = rpc_status.from_call(error)
        info = error_details_pb2.ErrorInfo()
        if status is None or not any(detail.Unpack(info) for detail in status.details):
            return str(error.code().name)
        return " ".join([error.code().name, info.reason, info.metadata.get("scope", "")]).strip()
    return ""


@pytest.mark.parametrize("token", ["", "stranger", digest(TOKENS["team-a"]), "x" * 5000])
def test_without_a_valid_token_nothing_is_answered_whatever_is_asked(
    deployment: Deployment, token: str
) -> None:
    with deployment.client(token) as client:
        refused = "UNAUTHENTICATED BAD_CREDENTIALS"
        for call in (client.generate, client.look, client.info, client.sequences):
            assert refusal(call) == refused
        raw = client.channel.unary_unary("/kvatlas.v1.GenerationService/Generate")
        assert refusal(lambda: raw(b"\xff\xff", timeout=CALL_SECONDS, metadata=client.metadata)) == refused, (
            "who calls is asked before what is read"
        )


def test_scopes_say_what_each_may_do(deployment: Deployment) -> None:
    with deployment.client("looker") as looker:
        assert refusal(looker.look) == ""
        assert refusal(looker.info) == "", "any valid credential"
        assert refusal(looker.generate) == "PERMISSION_DENIED MISSING_SCOPE generate"
    with deployment.client("team-a") as client:
        assert refusal(client.generate) == ""
        urgent = refusal(lambda: client.generate(priority=5))
        assert urgent == "PERMISSION_DENIED MISSING_SCOPE priority"
        assert refusal(lambda: client.generate(priority=-5)) == "", "less than others may everybody be"
    with deployment.client("team-b") as client:
        assert refusal(lambda: client.generate(priority=5)) == ""


def test_two_tenants_never_share_a_page(deployment: Deployment, wait_until: Any) -> None:
    """B022: the prefix cache answers the same prompt within a tenant only, and the page map shows no page
    that sequences of two tenants hold."""
    text = "a text that nobody has sent before this test, twice by each"
    with deployment.held(), deployment.client("team-a") as a, deployment.client("team-b") as b:
        hits = [client.generate(text).usage.prefix.hit_tokens for client in (a, b, a, b)]
        assert hits[:2] == [0, 0], "what one tenant has computed is not found by the other"
        assert min(hits[2:]) >= PAGE_SIZE, "its own is"
        streams = [client.stream(f"{name}-{n}") for n in (1, 2) for name, client in (("a", a), ("b", b))]
        for stream in streams:
            next(iter(stream))
        with deployment.client("operator") as operator:
            wait_until(lambda: set(held(operator)) == {"a-1", "a-2", "b-1", "b-2"}, "four sequences")
            pages = held(operator)
        with deployment.client("team-b") as other:
            named = {sequence.request_id for sequence in other.sequences()}
            assert "b-1" in named
            assert not any(name.startswith("a-") for name in named), "another tenant's ids are not shown"
            assert not any(sequence.tenant for sequence in other.sequences())
        for stream in streams:
            stream.cancel()
    assert pages["a-1"] & pages["a-2"], "one tenant's sequences share the prompt's pages"
    assert pages["b-1"] & pages["b-2"]
    assert not (pages["a-1"] | pages["a-2"]) & (pages["b-1"] | pages["b-2"])


def held(operator: Client) -> dict[str, set[int]]:
    """Pages by request, of the sequences that have any."""
    found = {each.request_id: np.frombuffer(each.page_ids, "<u4").tolist() for each in operator.sequences()}
    return {request_id: set(pages) for request_id, pages in found.items() if pages}


def test_a_principal_has_so_many_requests_at_once_and_others_are_not_touched(
    deployment: Deployment, wait_until: Any
) -> None:
    with deployment.held(), deployment.client("team-a") as a, deployment.client("team-b") as b:
        streams = [a.stream(f"share-{number}") for number in range(3)]
        for stream in streams:
            next(iter(stream))
        assert refusal(a.generate) == "RESOURCE_EXHAUSTED QUOTA_EXCEEDED"
        assert refusal(b.generate) == ""
        for stream in streams:
            stream.cancel()
        wait_until(lambda: not refusal(a.generate), "its share to be given back")


def test_one_tenant_cannot_cancel_what_another_runs(deployment: Deployment) -> None:
    with deployment.held(), deployment.client("team-a") as a, deployment.client("team-b") as b:
        stream = a.stream("mine")
        next(iter(stream))
        request = generation_pb2.CancelGenerationRequest(request_ids=["mine"])
        answer = b.generation.CancelGeneration(request, timeout=CALL_SECONDS, metadata=b.metadata)
        assert list(answer.unknown_ids) == ["mine"]
        answer = a.generation.CancelGeneration(request, timeout=CALL_SECONDS, metadata=a.metadata)
        assert list(answer.cancelled_ids) == ["mine"]
        list(stream)


def test_with_mtls_a_certificate_says_who_calls(deployment: Deployment) -> None:
    with deployment.secure_client("team-a") as client:
        assert client.generate(tokens=3).usage.completion_tokens == 3
    with deployment.secure_client("unknown") as client:
        assert refusal(client.generate) == "UNAUTHENTICATED BAD_CREDENTIALS"
    with deployment.secure_client("team-a", TOKENS["looker"]) as client:
        refused = "PERMISSION_DENIED MISSING_SCOPE generate"
        assert refusal(client.generate) == refused, "a token that is shown is what counts"
    with deployment.secure_client("") as client:
        assert refusal(client.generate) == "UNAVAILABLE", "no certificate, no connection"
    with grpc.insecure_channel(deployment.secure) as channel:
        assert refusal(Client(channel, TOKENS["operator"]).generate) == "UNAVAILABLE", "plaintext"


def test_a_certificate_of_another_authority_is_refused(deployment: Deployment) -> None:
    make_authority(deployment.folder, "foreign")
    make_certificate(deployment.folder, "forged", "team-a.test", ca="foreign")
    with deployment.secure_client("forged") as client:
        assert refusal(client.generate) == "UNAVAILABLE"


def test_the_dashboard_looks_through_tls_with_a_token(deployment: Deployment) -> None:
    ca = (deployment.folder / "ca.pem").read_bytes()
    tokens = [TOKENS["operator"]]
    source = ServiceSource(deployment.tls, lambda: tokens[0], ca)
    try:
        assert [worker.worker_id for worker in source.load()] == ["worker-0"]
        tokens[0] = TOKENS["stranger"]
        with pytest.raises(KvatlasError, match="no valid credentials"):
            source.load()
    finally:
        source.close()


@pytest.mark.skipif(not BUF, reason="needs buf (PyPI buf-bin)")
@pytest.mark.parametrize(("name", "said"), [("operator", '"text"'), ("stranger", "no valid credentials")])
def test_the_shell_command_of_the_document_works(deployment: Deployment, name: str, said: str) -> None:
    """The one of SECURITY.md, with this deployment's address and token."""
    [words] = re.findall(
        r"^buf (curl .+?[^\\])$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE | re.DOTALL
    )
    command = shlex.split(words.replace("$(cat token)", TOKENS[name]).replace("\\\n", " "))
    command = [word.replace("service:50051", deployment.tls) for word in command]
    done = subprocess.run([BUF, *command], cwd=deployment.folder, capture_output=True, text=True, timeout=60)
    assert said in done.stdout + done.stderr
    assert (done.returncode == 0) == (name == "operator")


def serial(deployment: Deployment, address: str) -> bytes:
    """The certificate that a new connection is shown."""
    read = deployment.folder.joinpath
    context = ssl.create_default_context(cafile=str(read("ca.pem")))
    context.load_cert_chain(str(read("team-a.pem")), str(read("team-a.key")))
    context.set_alpn_protocols(["h2"])
    host, _, port = address.partition(":")
    with (
        socket.create_connection((host, int(port)), timeout=CALL_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        return connection.getpeercert(binary_form=True) or b""


@pytest.mark.parametrize("listener", ["secure", "secure_admin"])
def test_a_new_certificate_is_used_and_a_broken_one_is_not_without_a_restart(
    deployment: Deployment, wait_until: Any, listener: str
) -> None:
    address: str = getattr(deployment, listener)
    log, (key, chain) = deployment.folder / "secure.log", pair(deployment, "server")
    before = serial(deployment, address)
    with deployment.secure_client("team-a", address=address) as client:
        assert refusal(client.checked) == ""
        make_certificate(deployment.folder, "renewed", "localhost")
        for new, old in zip(pair(deployment, "renewed"), (key, chain), strict=True):
            new.replace(old)
        wait_until(lambda: serial(deployment, address) != before, "the new certificate")
        assert refusal(client.checked) == "", "open connections go on"
    renewed, right = serial(deployment, address), chain.read_bytes()
    make_certificate(deployment.folder, "other", "localhost")
    for broken in (b"broken", pair(deployment, "other")[1].read_bytes()):  # the second has another key
        count = log.read_text().count("event=certificate_refused")
        chain.write_bytes(broken)
        assert [serial(deployment, address) for _ in range(3)] == [renewed] * 3
        assert log.read_text().count("event=certificate_refused") == count + 1, "once, however many connect"
    with deployment.secure_client("team-a", address=address) as client:
        assert refusal(client.checked) == ""
    chain.write_bytes(right)


def pair(deployment: Deployment, name: str) -> tuple[Path, Path]:
    return deployment.folder / f"{name}.key", deployment.folder / f"{name}.pem"


def test_operators_are_answered_over_tls_beside_the_public_listener(deployment: Deployment) -> None:
    """Both listeners have TLS: gRPC would give a configuration that they share to one of them alone."""
    with deployment.secure_client("team-a", TOKENS["operator"], deployment.secure_admin) as client:
        answer = client.admin.ListPinnedPrefixes(
            server_pb2.ListPinnedPrefixesRequest(), timeout=CALL_SECONDS, metadata=client.metadata
        )
        assert not answer.pins
    with deployment.secure_client("team-a", TOKENS["operator"]) as client:
        assert refusal(client.info) == ""


def test_a_token_is_given_and_taken_without_a_restart_and_secrets_are_shown_nowhere(
    deployment: Deployment, wait_until: Any
) -> None:
    """Tokens, old and new and wrong, their digests, and a prompt: in no log, no metric, no status."""
    with deployment.client("team-a") as client:
        client.generate()
    renewed = {name: TOKENS[name] for name in SCOPES} | {"team-b": "fresh-7c1aa0"}
    write_private(deployment.auth_file, auth_text(renewed))
    with deployment.client("team-b") as old, deployment.client("fresh-7c1aa0") as new:
        wait_until(lambda: not refusal(new.info), "the new token")
        assert refusal(old.info) == "UNAUTHENTICATED BAD_CREDENTIALS"
        write_private(deployment.auth_file, f'oops = "{TOKENS["team-a"]}')
        wait_until(lambda: "event=auth_file_refused" in deployment.log(), "the refusal in the log")
        assert refusal(new.info) == "", "the old file stays in force"
    shown = [deployment.log()]
    with urllib.request.urlopen(deployment.metrics, timeout=CALL_SECONDS) as answer:
        shown.append(answer.read().decode())
    with deployment.client("stranger") as client, pytest.raises(grpc.RpcError) as raised:
        client.generate()
    shown.append(f"{raised.value!r} {raised.value.trailing_metadata()}")
    assert "principal=team-a" in shown[0], "names are for the log"
    secrets = [*TOKENS.values(), "fresh-7c1aa0"]
    for secret in (*secrets, *map(digest, secrets), PROMPT):
        assert not any(secret in text for text in shown)
