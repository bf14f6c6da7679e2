"""`kvatlas dashboard` in front of a service with mTLS and tokens, started as an operator would."""

import hashlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from dashboard.client import ServiceSource
from kvatlas.client.errors import Unavailable

ROOT = Path(__file__).parents[2]
PAGES = 63
TOKEN = "looker-4f1d0c9be2"
END_SECONDS = 30.0
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)


def make_certificates(folder: Path) -> None:
    """An authority, the service's pair for the loopback, and the dashboard's."""
    openssl(folder, "req", "-x509", *CURVE, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    for name, alternative in (("service", "IP:127.0.0.1"), ("dashboard", "DNS:dashboard.test")):
        subject = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={alternative}")
        signer = ("-CA", "ca.pem", "-CAkey", "ca.key")
        openssl(
            folder, "req", "-x509", *CURVE, "-keyout", f"{name}.key", "-out", f"{name}.pem", *subject, *signer
        )


def write_private(path: Path, text: str) -> None:
    aside = path.with_suffix(".new")
    aside.touch(mode=0o600)
    aside.write_text(text)
    aside.replace(path)


@contextmanager
def running(folder: Path, name: str, *words: str) -> Iterator[Path]:
    """A process of ours; its log."""
    log = folder / f"{name}.log"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=folder, env=environment, stdout=file, stderr=file
        )
    try:
        yield log
    finally:
        process.terminate()
        process.wait(END_SECONDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all files are."""
    return tmp_path_factory.mktemp("secure")


@pytest.fixture(scope="module")
def address(folder: Path, wait_until: Callable[..., None]) -> Iterator[str]:
    """A service that asks for a certificate and for a token."""
    make_certificates(folder)
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    principal = '[[principal]]\nname = "looker"\ntenant = "ops"\nscopes = ["cache.read"]\n'
    write_private(folder / "auth.toml", f'{principal}token_sha256 = ["{digest}"]\n')
    write_private(folder / "token", TOKEN)
    engine = f"ipc://{folder}/engine"
    worker = ["worker", "--runner", "fake", "--model", "random:tiny", "--metrics-port", "-1"]
    worker += [
        "--num-pages",
        str(PAGES),
        "--engine-address",
        engine,
        "--pages-address",
        f"ipc://{folder}/pages",
    ]
    service = ["service", "--model", "random:tiny", "--workers", engine, "--address", "127.0.0.1:0"]
    service += ["--auth-file", "auth.toml", "--drain-listen", "0", "--grace", "1", "--metrics-address", ""]
    service += ["--tls-certificate", "service.pem", "--tls-key", "service.key", "--tls-client-ca", "ca.pem"]
    with running(folder, "worker", *worker), running(folder, "service", *service) as log:
        wait_until(lambda: "event=listening address=" in log.read_text(), "the service")
        found = re.search(r"event=listening address=\S+ port=(\d+)", log.read_text())
        assert found is not None
        yield f"127.0.0.1:{found[1]}"


def health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "live/health", timeout=10) as answer:
        told: dict[str, Any] = json.load(answer)
        return told


def test_it_looks_through_mtls_with_a_token_that_may_change(
    address: str, folder: Path, wait_until: Callable[..., None]
) -> None:
    command = ["kvatlas.cli", "dashboard", "--address", address, "--listen", "127.0.0.1:0"]
    command += ["--ca-file", "ca.pem", "--certificate-file", "dashboard.pem", "--key-file", "dashboard.key"]
    command += ["--token-file", "token", "--ready-file", "ready.json"]
    with running(folder, "dashboard", *command) as log:
        wait_until((folder / "ready.json").exists, "the dashboard")
        url = json.loads((folder / "ready.json").read_text())["url"]
        wait_until(lambda: "live" in health(url)["workers"].values(), "a live map")
        with connect(f"ws{url[4:]}live/pages", compression=None) as socket:
            hello: dict[str, Any] = {}
            while hello.get("type") != "hello":
                message = socket.recv(timeout=END_SECONDS)
                hello = json.loads(message) if isinstance(message, str) else {}
        assert hello["page_count"] == PAGES + 1
        write_private(folder / "token", "a-stranger-with-a-token")
        wait_until(lambda: "credentials" in health(url)["failure"], "a refusal in words")
        write_private(folder / "token", TOKEN)
        wait_until(lambda: not health(url)["failure"], "the roster again")
        assert TOKEN not in log.read_text()
        assert "stranger" not in log.read_text()


def test_without_a_certificate_nobody_answers(address: str, folder: Path) -> None:
    source = ServiceSource(address, lambda: TOKEN, (folder / "ca.pem").read_bytes())
    try:
        with pytest.raises(Unavailable, match=address):
            source.server()
    finally:
        source.close()
