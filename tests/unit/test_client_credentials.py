"""Tokens and TLS of the client library: what goes over the wire, what is refused before, what nobody sees."""

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvatlas.client import errors
from kvatlas.client.admin import Admin
from kvatlas.client.aio import AsyncClient
from kvatlas.client.channel import Target
from kvatlas.client.config import credentials_from_environment
from kvatlas.client.credentials import Credentials, CredentialsError, is_local
from kvatlas.client.errors import Reason, Unavailable, build_error
from kvatlas.client.sync import Client
from kvatlas.v1 import errors_pb2, generation_pb2_grpc, server_pb2, server_pb2_grpc
from kvatlas.v1 import generation_pb2 as pb

TOKEN = "f00d-9c1e"


class Listener(
    generation_pb2_grpc.GenerationServiceServicer,
    server_pb2_grpc.AdminServiceServicer,
    server_pb2_grpc.ServerServiceServicer,
):
    """Notes with which credentials it was called."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def _note(self, context: Any) -> None:
        self.seen.append(dict(context.invocation_metadata()).get("authorization", ""))

    def Generate(self, request: Any, context: Any) -> pb.GenerateResponse:
        self._note(context)
        return pb.GenerateResponse(choices=[pb.Choice(text="hi", finish_reason=pb.FINISH_REASON_EOS)])

    def StreamGenerate(self, request: Any, context: Any) -> Iterator[pb.StreamGenerateResponse]:
        self._note(context)
        yield pb.StreamGenerateResponse(summary=pb.GenerationSummary())

    def StopDrain(self, request: Any, context: Any) -> server_pb2.StopDrainResponse:
        self._note(context)
        return server_pb2.StopDrainResponse()

    def WatchLoad(self, request: Any, context: Any) -> Iterator[server_pb2.WatchLoadResponse]:
        self._note(context)
        for number in range(3):
            yield server_pb2.WatchLoadResponse(load=server_pb2.Load(active_requests=number))


@contextmanager
def listening(
    secure: grpc.ServerCredentials | None = None, place: str = "127.0.0.1:0"
) -> Iterator[tuple[Listener, str]]:
    listener, running = Listener(), grpc.server(futures.ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(listener, running)
    server_pb2_grpc.add_AdminServiceServicer_to_server(listener, running)
    server_pb2_grpc.add_ServerServiceServicer_to_server(listener, running)
    port = running.add_secure_port(place, secure) if secure else running.add_insecure_port(place)
    running.start()
    try:
        yield listener, place if place.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        running.stop(0).wait()


def call_blocking(address: str, credentials: Credentials) -> None:
    with Client(address, credentials=credentials) as client:
        client.generate("x")
        list(client.stream("x"))
        assert [load.active_requests for _, load in zip(range(3), client.watch_load(), strict=False)] == [
            0,
            1,
            2,
        ]


def call_async(address: str, credentials: Credentials) -> None:
    async def main() -> None:
        async with AsyncClient(address, credentials=credentials) as client:
            await client.generate("x")
            async with client.stream("x") as stream:
                assert len([event async for event in stream]) == 1
            loads = client.watch_load()
            assert (await anext(loads)).active_requests == 0
            await loads.aclose()

    asyncio.run(main())


CALLS = [call_blocking, call_async]
Call = Callable[[str, Credentials], None]


@pytest.mark.parametrize("call", CALLS)
def test_a_token_goes_with_every_call_and_a_changed_file_is_followed(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "token"
    with listening() as (listener, address):
        call(address, Credentials(token=TOKEN))
        assert listener.seen == [f"Bearer {TOKEN}"] * 3
        listener.seen.clear()
        call(address, Credentials())
        assert listener.seen == [""] * 3
        listener.seen.clear()
        file.write_text("first\n")
        with Admin(address, credentials=Credentials(token_file=file)) as admin:
            admin.stop_drain()
            file.write_text("second\n")
            admin.stop_drain()
        assert listener.seen == ["Bearer first", "Bearer second"]


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and server and client, which it signed; other.pem, which signed nothing."""
    folder = tmp_path_factory.mktemp("tls")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    for name in ("ca", "other"):
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        openssl(folder, "req", "-x509", *curve, *files, "-subj", f"/CN={name}")
    for name in ("server", "client"):
        (folder / "ext").write_text(f"subjectAltName=DNS:{name}.test,IP:127.0.0.1\n")
        openssl(folder, "req", *curve[:-2], "-keyout", f"{name}.key", "-out", "csr", "-subj", f"/CN={name}")
        signer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "ext")
        openssl(folder, "x509", "-req", "-in", "csr", "-out", f"{name}.pem", *signer)
    return folder


def server_side(folder: Path, *, wants_client: bool) -> grpc.ServerCredentials:
    pair = ((folder / "server.key").read_bytes(), (folder / "server.pem").read_bytes())
    ca = (folder / "ca.pem").read_bytes()
    return grpc.ssl_server_credentials([pair], ca if wants_client else None, wants_client)


@pytest.mark.parametrize("call", CALLS)
def test_tls_with_its_own_authority_and_a_client_certificate(call: Call, certificates: Path) -> None:
    trusting = {"ca_file": certificates / "ca.pem", "server_name": "server.test"}
    known = {"certificate_file": certificates / "client.pem", "key_file": certificates / "client.key"}
    with listening(server_side(certificates, wants_client=True)) as (listener, address):
        call(address, Credentials(token=TOKEN, **trusting, **known))
        assert listener.seen == [f"Bearer {TOKEN}"] * 3
        with pytest.raises(Unavailable), Client(address, credentials=Credentials(**trusting)) as client:
            client.generate("x", timeout_seconds=20)
        assert len(listener.seen) == 3


@pytest.mark.parametrize("call", CALLS)
def test_several_services_of_one_host_are_reached_over_tls(call: Call, certificates: Path) -> None:
    """gRPC itself would look for the whole list of addresses in each certificate."""
    credentials = Credentials(token=TOKEN, ca_file=certificates / "ca.pem")
    side = server_side(certificates, wants_client=False)
    with listening(side) as (one, first), listening(side) as (other, second):
        call(f"{first},{second}", credentials)
        assert one.seen + other.seen == [f"Bearer {TOKEN}"] * 3


@pytest.mark.parametrize("call", CALLS)
def test_settings_for_tls_leave_a_unix_socket_reachable(
    call: Call, certificates: Path, tmp_path: Path
) -> None:
    """They come from the environment, for every command, and a service's sockets have no TLS."""
    with listening(place=f"unix:{tmp_path}/socket") as (listener, address):
        call(address, Credentials(token=TOKEN, ca_file=certificates / "ca.pem"))
        assert listener.seen == [f"Bearer {TOKEN}"] * 3


def test_several_hosts_over_tls_need_a_name_that_their_certificates_share() -> None:
    addresses = "10.0.0.1:1,10.0.0.2:1"
    with pytest.raises(CredentialsError, match="several hosts need a server name"):
        Target(addresses, Credentials(use_tls=True))
    Target(addresses, Credentials(use_tls=True, server_name="kvatlas.internal"))
    Target("[::1]:1,[::1]:2", Credentials(use_tls=True))


@pytest.mark.parametrize("trusting", ["another authority", "another name", "plaintext"])
def test_a_server_that_is_not_the_one_meant_gets_no_token(trusting: str, certificates: Path) -> None:
    ca = certificates / ("other.pem" if trusting == "another authority" else "ca.pem")
    name = "elsewhere.test" if trusting == "another name" else "server.test"
    credentials = Credentials(token=TOKEN, ca_file=ca, server_name=name)
    if trusting == "plaintext":
        credentials = Credentials(token=TOKEN)
    with (
        listening(server_side(certificates, wants_client=False)) as (listener, address),
        Client(address, credentials=credentials) as client,
    ):
        with pytest.raises(Unavailable) as caught:
            client.generate("x", timeout_seconds=20)
        assert listener.seen == []
        assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "is_safe"),
    [
        ("127.0.0.1:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("dns:///localhost:1", True),
        ("unix:/run/x", True),
        ("unix-abstract:x", True),
        ("10.0.0.1:1", False),
        ("service:1", False),
        ("dns:///service:1", False),
        ("127.0.0.1.example.com:1", False),
    ],
)
def test_a_token_leaves_this_machine_over_tls_only(address: str, is_safe: bool) -> None:
    assert is_local(address) is is_safe
    if is_safe:
        Target(address, Credentials(token=TOKEN))
        return
    with pytest.raises(CredentialsError, match="in plain text") as caught:
        Target(address, Credentials(token=TOKEN))
    assert TOKEN not in str(caught.value)
    Target(address, Credentials(token=TOKEN, use_tls=True))
    Target(address, Credentials(token=TOKEN, allows_plaintext_token=True))
    Target(address, Credentials())


def test_one_open_line_among_several_addresses_is_enough_to_refuse() -> None:
    with pytest.raises(CredentialsError, match=r"10\.0\.0\.2:1"):
        Target(["127.0.0.1:1", "10.0.0.2:1"], Credentials(token=TOKEN))


def test_no_repr_and_no_refusal_shows_a_token(tmp_path: Path) -> None:
    assert TOKEN not in repr(Credentials(token=TOKEN))
    file = tmp_path / "token"
    for content in (f"{TOKEN} and more", "", f"{TOKEN}\n{TOKEN}", "x" * 5000, "\N{SNOWMAN}"):
        file.write_text(content)
        with pytest.raises(CredentialsError) as caught:
            Credentials(token_file=file).metadata()
        assert TOKEN not in str(caught.value)
        assert str(file) in str(caught.value)
    for bad in (
        {"token": f"{TOKEN} two"},
        {"token": TOKEN, "token_file": file},
        {"key_file": file},
    ):
        with pytest.raises(CredentialsError) as caught:
            Credentials(**bad)  # type: ignore[arg-type]
        assert TOKEN not in str(caught.value)


def test_files_that_cannot_be_used_are_told_when_the_client_is_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("two words")
    for given, words in (
        (Credentials(token_file=file), "visible ASCII"),
        (Credentials(ca_file=file), "no PEM file"),
        (Credentials(certificate_file=file, key_file=file), "no PEM file"),
        (Credentials(ca_file=tmp_path / "none"), "No such file"),
    ):
        with pytest.raises(CredentialsError, match=words):
            Client("127.0.0.1:1", credentials=given)


def test_a_token_has_4096_characters_at_most() -> None:
    assert Credentials(token="x" * 4096).metadata() == (("authorization", f"Bearer {'x' * 4096}"),)
    with pytest.raises(CredentialsError):
        Credentials(token="x" * 4097)


def test_the_environment_is_read_where_it_is_asked_for(tmp_path: Path) -> None:
    given = {"KVATLAS_TOKEN": TOKEN, "KVATLAS_CA_FILE": "/ca.pem"}
    found = credentials_from_environment(given)
    assert (found.token, found.ca_file, found.is_tls) == (TOKEN, Path("/ca.pem"), True)
    assert credentials_from_environment({}) == Credentials()


def test_several_addresses_become_one_target_or_are_refused() -> None:
    assert str(Target("10.0.0.1:1,10.0.0.2:2")) == "10.0.0.1:1,10.0.0.2:2"
    assert str(Target(["[::1]:1", "[::2]:2"])) == "[::1]:1,[::2]:2"
    for bad in ("a:1,b:2", "10.0.0.1:1,[::1]:2", "10.0.0.1:1,"):
        with pytest.raises(ValueError, match="several addresses must all be"):
            Target(bad)
    for empty in ("", " ", ",", ()):
        with pytest.raises(ValueError, match="the address is empty"):
            Target(empty)
    for url in ("http://10.0.0.1:1", "https://10.0.0.1:1/", "10.0.0.1:1,http://10.0.0.1:1"):
        with pytest.raises(ValueError, match=r"gRPC's addresses have no https?://, say '10\.0\.0\.1:1'"):
            Target(url)
    for wrapped in ("10.0.0.1:65537", "[::1]:65536", "dns:///a:115587", "10.0.0.1:1,10.0.0.2:99999"):
        with pytest.raises(ValueError, match=r"': \d+ is no port"):  # gRPC asked port 1, 0, 50051 and 34463
            Target(wrapped)
    for good in ("dns:///a:1", "unix:///run/a", "unix:/run/a", "unix:/run/a:70000", "10.0.0.1:65535", "::1"):
        assert str(Target(good)) == good


def test_every_reason_of_the_protocol_is_a_reason_here_and_has_its_class() -> None:
    names = {name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.keys()}  # noqa: SIM118
    assert {*Reason} == names - {"UNSPECIFIED"}
    # What WORKER_LOST means for the caller is in its status: whether anything had been sent.
    assert errors._BY_REASON.keys() == {*Reason} - {Reason.WORKER_LOST}


def test_the_reason_decides_where_a_proxy_has_changed_the_status() -> None:
    from google.protobuf import any_pb2
    from google.rpc import error_details_pb2, status_pb2

    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason="NOT_READY", domain="kvatlas.v1"))
    raw = status_pb2.Status(details=[packed]).SerializeToString()
    error = build_error("INTERNAL", "x", raw, "host:1")
    assert isinstance(error, Unavailable)
    assert error.reason is Reason.NOT_READY
    packed.Pack(error_details_pb2.ErrorInfo(reason="FROM_THE_FUTURE", domain="kvatlas.v1"))
    raw = status_pb2.Status(details=[packed]).SerializeToString()
    assert build_error("UNAVAILABLE", "x", raw, "host:1").reason == "FROM_THE_FUTURE"
