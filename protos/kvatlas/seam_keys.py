"""Keys of the seam between service and worker: which addresses need them, and the files that hold them.

CURVE (https://rfc.zeromq.org/spec/26/) encrypts a tcp seam and lets each end prove who it is. Both ends have
a key pair in a file of their own and a file with the public keys of the other end:

    kvatlas keys seam-keys                  # worker.key, worker.pub, service.key, service.pub
    worker:  --seam-key worker.key  --seam-peers service.pub
    service: --seam-key service.key --seam-peers worker.pub

Each file holds lines of a word and a key of 40 characters in Z85; a file of peers may be several .pub files
after one another. Raises SeamKeyError throughout, never with a secret in its text.
"""

import ipaddress
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

MAX_FILE_BYTES = 64 << 10
MAX_PEERS = 512
OTHERS_MODE = 0o037  # its group may read, as a mounted secret needs; nobody else may do anything
WRITE_MODE = 0o022  # a public key may be read by all, but who can write it decides who is let in

_NAME = re.compile(r"[\w.:-]{1,64}", re.ASCII)


class SeamKeyError(Exception):
    """A key file that cannot be used; the text names file and line."""


@dataclass(frozen=True, slots=True)
class SeamKey:
    """A key pair as ZeroMQ takes it: 40 bytes of Z85 each. Not printable by accident."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class SeamFiles:
    """Where a process finds its own pair and the public keys of the other end."""

    key: Path
    peers: Path

    def read(self) -> tuple[SeamKey, Mapping[bytes, str]]:
        """Own pair; names by public key."""
        return read_key(self.key), read_peers(self.peers)


def is_far(address: str) -> bool:
    """Whether an address of the seam can be reached from other hosts, or leads to one."""
    if not address.startswith(("tcp://", "dns://")):
        return False
    host = address.partition("://")[2].rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def seam_faults(addresses: Mapping[str, str], key: str, peers: str, *, insecure: bool) -> list[str]:
    """What is wrong with a process's settings of the seam. `addresses`: by the name of their setting."""
    faults = []
    if bool(key) != bool(peers):
        faults.append("seam_key and seam_peers: one without the other")
    faults += [
        f"{name}: no file {path!r}"
        for name, path in (("seam_key", key), ("seam_peers", peers))
        if path and not Path(path).is_file()
    ]
    if not key and not insecure:
        faults += [
            f"{name}: {address} is plaintext and not loopback: give it keys (seam_key), --insecure allows it"
            for name, address in addresses.items()
            if is_far(address)
        ]
    return faults


def read_key(path: Path) -> SeamKey:
    """The pair in a file that is nobody else's."""
    lines = _read(path, OTHERS_MODE)
    if lines.keys() != {"public", "secret"}:
        raise SeamKeyError(f"{path}: wants the lines `public KEY` and `secret KEY`, and no other")
    pair = SeamKey(lines["public"], lines["secret"])
    if zmq.curve_public(pair.secret) != pair.public:
        raise SeamKeyError(f"{path}: public is not the key of secret")
    return pair


def read_peers(path: Path) -> Mapping[bytes, str]:
    """Names by public key, in the order of the file."""
    lines = _read(path, WRITE_MODE)
    if "secret" in lines:
        raise SeamKeyError(f"{path}: holds a secret key; it wants public ones")
    if not 0 < len(lines) <= MAX_PEERS:
        raise SeamKeyError(f"{path}: holds {len(lines)} keys, not 1 to {MAX_PEERS}")
    return {key: name for name, key in lines.items()}


def write_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """A new pair: NAME.key of mode 0600 and NAME.pub. Files that are there stay, and are an error."""
    if not _NAME.fullmatch(name) or name in ("public", "secret"):
        raise SeamKeyError(f"{name!r}: wants 1 to 64 letters, digits, '.', ':', '_', '-'")
    public, secret = zmq.curve_keypair()
    key, pub = folder / f"{name}.key", folder / f"{name}.pub"
    head = f"# The seam's key of {name}. Whoever reads it is {name}."
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_new(key, f"{head}\npublic {public.decode()}\nsecret {secret.decode()}\n", 0o600)
        _write_new(pub, f"{name} {public.decode()}\n", 0o644)
    except OSError as error:
        raise SeamKeyError(f"{error.filename}: {error.strerror}") from None
    return key, pub


def _write_new(path: Path, text: str, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)


def _read(path: Path, forbidden_mode: int) -> dict[str, bytes]:
    """Keys by the word before them."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SeamKeyError(f"{path}: {error.strerror}") from None
    if mode & forbidden_mode:
        raise SeamKeyError(f"{path} has mode {mode:o}: chmod {0o777 & ~forbidden_mode & 0o644:04o}")
    if len(data) > MAX_FILE_BYTES:
        raise SeamKeyError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    found: dict[str, bytes] = {}
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if len(words) != 2 or not _NAME.fullmatch(words[0]) or not _is_key(words[1]):
            raise SeamKeyError(f"{path}, line {number}: is not a name and a key of 40 characters")
        if words[0] in found or words[1].encode() in found.values():
            raise SeamKeyError(f"{path}, line {number}: is there twice")
        found[words[0]] = words[1].encode()
    return found


def _is_key(text: str) -> bool:
    if len(text) != 40 or not text.isascii():
        return False
    try:
        return len(z85.decode(text.encode())) == 32
    except (KeyError, ValueError, struct.error):
        return False
