"""Keys of the seam: what their files must be, and where a process refuses to do without them."""

import os
import random
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from kvatlas.seam_keys import SeamKeyError, is_far, read_key, read_peers, write_pair
from service.config import ConfigError, ServiceConfig
from service.config import from_args as service_args
from worker.config import from_args as worker_args

ROOT = Path(__file__).resolve().parents[2]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_pair_is_written_for_its_owner_alone_and_read_again(tmp_path: Path) -> None:
    key, pub = write_pair(tmp_path / "seam", "worker")
    assert (mode(key), mode(tmp_path / "seam")) == (0o600, 0o700)
    pair = read_key(key)
    assert zmq.curve_public(pair.secret) == pair.public
    assert read_peers(pub) == {pair.public: "worker"}
    assert pair.secret.decode() not in repr(pair) + pub.read_text()
    with pytest.raises(SeamKeyError, match="exists"):
        write_pair(tmp_path / "seam", "worker")
    assert read_key(key) == pair, "what is there is not overwritten"


def test_several_files_after_one_another_are_one_file_of_peers(tmp_path: Path) -> None:
    pubs = [write_pair(tmp_path, name)[1] for name in ("service-1", "service-2")]
    peers = tmp_path / "services.pub"
    peers.write_text("# who may connect\n\n" + "".join(pub.read_text() for pub in pubs))
    assert list(read_peers(peers).values()) == ["service-1", "service-2"]


@pytest.mark.parametrize("bits", [0o640, 0o600, 0o400, 0o440])
def test_a_secret_may_be_read_by_its_group(tmp_path: Path, bits: int) -> None:
    key, _ = write_pair(tmp_path, "worker")
    key.chmod(bits)
    read_key(key)


@pytest.mark.parametrize("bits", [0o644, 0o604, 0o660, 0o602, 0o666])
def test_a_secret_that_others_may_read_or_write_is_refused(tmp_path: Path, bits: int) -> None:
    key, _ = write_pair(tmp_path, "worker")
    key.chmod(bits)
    with pytest.raises(SeamKeyError, match="chmod 0640"):
        read_key(key)


def test_public_keys_that_others_may_write_are_refused(tmp_path: Path) -> None:
    _, pub = write_pair(tmp_path, "worker")
    pub.chmod(0o664)
    with pytest.raises(SeamKeyError, match="chmod 0644"):
        read_peers(pub)


def test_files_that_are_no_keys_are_refused_by_name_and_line_without_their_text(tmp_path: Path) -> None:
    key, pub = write_pair(tmp_path, "worker")
    other, _ = write_pair(tmp_path, "other")
    secret = read_key(key).secret.decode()
    for text, words in (
        ("", "wants the lines"),
        (f"public {secret}\nsecret {secret}\n", "twice"),
        (f"secret {secret}\n", "wants the lines"),
        (f"secret {secret[:-1]}\n", "line 1"),
        ("secret " + "#" * 40, "line 1"),
        ("secret " + "é" * 40, "line 1"),
        (key.read_text().replace(secret, read_key(other).secret.decode()), "not the key of secret"),
        ("x" * 70_000, "larger"),
    ):
        wrong = tmp_path / "wrong"
        wrong.touch(mode=0o600)
        wrong.write_text(text)
        with pytest.raises(SeamKeyError, match=words) as refused:
            read_key(wrong)
        assert secret not in str(refused.value)
    with pytest.raises(SeamKeyError, match="No such file"):
        read_key(tmp_path / "nothing")
    with pytest.raises(SeamKeyError, match="secret key"):
        read_peers(key)
    (tmp_path / "none").write_text("# nobody\n")
    with pytest.raises(SeamKeyError, match="0 keys"):
        read_peers(tmp_path / "none")
    assert read_peers(pub)


def test_no_file_whatever_it_holds_is_more_than_refused(tmp_path: Path) -> None:
    key, _ = write_pair(tmp_path, "worker")
    chance, right = random.Random(7), key.read_bytes()
    for _ in range(400):
        data = bytearray(right)
        for _ in range(chance.choice((1, 3, 20))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        key.write_bytes(data[: chance.choice((len(data), chance.randrange(len(data))))])
        for read in (read_key, read_peers):
            with suppress(SeamKeyError):
                read(key)


@pytest.mark.parametrize(
    ("address", "far"),
    [
        ("ipc:///run/engine", False),
        ("tcp://127.0.0.1:5", False),
        ("tcp://127.3.2.1:5", False),
        ("tcp://[::1]:5", False),
        ("tcp://localhost:5", False),
        ("tcp://0.0.0.0:5", True),
        ("tcp://*:5", True),
        ("tcp://[::]:5", True),
        ("tcp://10.0.0.1:5", True),
        ("tcp://localhost.example:5", True),
        ("tcp://127.0.0.1.example:5", True),
        ("dns://workers:5", True),
    ],
)
def test_what_leaves_the_host_is_told_by_the_address(address: str, far: bool, tmp_path: Path) -> None:
    assert is_far(address) == far
    key, pub = write_pair(tmp_path, "worker")
    keys = ["--seam-key", str(key), "--seam-peers", str(pub)]
    if far:
        with pytest.raises(ConfigError, match="plaintext and not loopback"):
            service_args(["--workers", address], {})
        if address.startswith("tcp"):
            with pytest.raises(ConfigError, match=r"engine_address.*plaintext and not loopback"):
                worker_args(["--engine-address", address], {})
            with pytest.raises(ConfigError, match=r"pages_address.*plaintext and not loopback"):
                worker_args(["--pages-address", address], {})
    for words in (keys, ["--insecure"], *([] if far else [[]])):
        service_args(["--workers", address, *words], {})
        if not address.startswith("dns"):
            worker_args(["--engine-address", address, *words], {})


def test_a_key_without_peers_and_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    key, _ = write_pair(tmp_path, "worker")
    with pytest.raises(ConfigError, match="one without the other"):
        worker_args(["--seam-key", str(key)], {})
    with pytest.raises(ConfigError, match="seam_peers: no file"):
        ServiceConfig(seam_key=str(key), seam_peers=str(tmp_path / "nobody"))


def test_the_command_makes_keys_and_says_whose_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "seam"
    command = [sys.executable, "-m", "kvatlas.cli", "keys", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "protos")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {
        "worker.key",
        "worker.pub",
        "service.key",
        "service.pub",
    }
    assert read_key(folder / "service.key").secret.decode() not in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert again.returncode == 1
    assert "exists" in again.stderr
