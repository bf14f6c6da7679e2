"""Who calls, and what he may do: the auth file, its renewal, and the check of each call.

Owns the principals. A token is looked up by its SHA-256; neither it nor the digest leaves this module: not
in logs, not in errors, not in metrics. Without an auth file nobody is asked and everybody may do everything,
which is for the loopback.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvatlas.file_stamp import file_stamp
from service import errors
from service.admission import Quota
from service.interceptor import metadata_values
from service.request import Call

SCOPES = frozenset({"generate", "cache.read", "priority", "admin"})
MAX_FILE_BYTES = 1 << 20
MAX_TOKEN_LENGTH = 4096
MAX_REQUESTS = 1 << 20  # of a limit
RELOAD_SECONDS = 2.0
OTHERS_MODE = (
    0o037  # its group may read, as a mounted secret of Kubernetes needs; nobody else may do anything
)
SAN_KINDS = ("dns:", "uri:", "email:")

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_TENANT = re.compile(r"[\w.-]{0,64}", re.ASCII)  # no zero byte: it ends the tenant in a page's key
_SCOPE_OF_SERVICE = {
    "/kvatlas.v1.GenerationService": "generate",
    "/kvatlas.v1.CacheService": "cache.read",
    "/kvatlas.v1.ServerService": "",  # any valid credential
}
_BEARER = "Bearer "
_LIMITS = ("max_active_requests", "max_queued_requests")
_KEYS = frozenset({"name", "tenant", "token_sha256", "san", "scopes", *_LIMITS})

log = logging.getLogger("service.auth")


class AuthFileError(Exception):
    """The file cannot be used. The text names the entry, never a digest or a token."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Someone with credentials. Not printable by accident: digests are no part of its repr."""

    name: str
    tenant: str
    scopes: frozenset[str]
    digests: tuple[bytes, ...] = field(default=(), repr=False)
    sans: tuple[str, ...] = ()
    max_active_requests: int = 0  # generations at once in one process, and text calls; 0: no limit of its own
    max_queued_requests: int = 0  # those of them that no worker has admitted yet; 0: no limit of its own


class Principals:
    """All of one file, found by token or by the names in a client's certificate."""

    def __init__(self, principals: Sequence[Principal]) -> None:
        self._by_digest: dict[bytes, Principal] = {}
        self._by_san: dict[str, Principal] = {}
        for each in principals:
            for digest in each.digests:
                if self._by_digest.setdefault(digest, each) is not each:
                    raise AuthFileError(f"{each.name}: has a token of another principal")
            for san in each.sans:
                if self._by_san.setdefault(san, each) is not each:
                    raise AuthFileError(f"{each.name}: has the san of another principal: {san}")

    def __len__(self) -> int:
        return len({id(each) for each in (*self._by_digest.values(), *self._by_san.values())})

    @property
    def use_certificates(self) -> bool:
        """Whether any of them is known by a certificate."""
        return bool(self._by_san)

    @property
    def need_certificates(self) -> bool:
        """Whether any of them has no token: without mTLS he could never call."""
        return any(not each.digests for each in self._by_san.values())

    def of_token(self, token: str) -> Principal | None:
        """Whose token it is."""
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        found = self._by_digest.get(digest)
        if found is None or not any(hmac.compare_digest(digest, known) for known in found.digests):
            return None
        return found

    def of_certificate(self, names: Sequence[str]) -> Principal | None:
        """Who has one of these subject alternative names."""
        return next((found for name in names if (found := self._by_san.get(name))), None)


def read_principals(path: Path) -> Principals:
    """The principals of an auth file. Raises AuthFileError."""
    try:
        with path.open("rb") as file:
            if path.stat().st_mode & OTHERS_MODE:
                raise AuthFileError(f"{path} may be read or written by others: chmod 0600")
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise AuthFileError(f"{path}: {error.strerror}") from None
    if len(text) > MAX_FILE_BYTES:
        raise AuthFileError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        table = tomllib.loads(text.decode())
    except UnicodeDecodeError:
        raise AuthFileError(f"{path} is no UTF-8") from None
    except ValueError as error:  # TOML's, and of a number that is too long
        # The parser's text may quote what it read.
        where = re.search(r"\(at [^()]*\)$", str(error))
        raise AuthFileError(f"{path} is no TOML {where[0] if where else ''}".rstrip()) from None
    except RecursionError:
        raise AuthFileError(f"{path} is nested too deeply") from None
    if unknown := sorted(table.keys() - {"principal"}):
        raise AuthFileError(f"{path}: no such key: {', '.join(unknown)}")
    entries = table.get("principal")
    if not isinstance(entries, list) or not entries:
        raise AuthFileError(f"{path} names no [[principal]]")
    made = [_principal(number, entry) for number, entry in enumerate(entries, 1)]
    if len({each.name for each in made}) != len(made):
        raise AuthFileError(f"{path}: two principals have one name")
    return Principals(made)


def _principal(number: int, entry: Any) -> Principal:
    where = f"principal {number}"
    if not isinstance(entry, Mapping):
        raise AuthFileError(f"{where} is no table")
    if unknown := sorted(entry.keys() - _KEYS):
        raise AuthFileError(f"{where}: no such key: {', '.join(unknown)}")
    name, tenant = entry.get("name", ""), entry.get("tenant", "")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise AuthFileError(f"{where}: name is not 1 to 64 letters, digits, '.', '_', '-'")
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise AuthFileError(f"{where}: tenant is not up to 64 letters, digits, '.', '_', '-'")
    digests, sans, scopes = (_texts(where, entry, key) for key in ("token_sha256", "san", "scopes"))
    if not all(_DIGEST.fullmatch(digest) for digest in digests):
        raise AuthFileError(f"{where}: token_sha256 is not 64 lower-case hex digits")
    if not all(san.startswith(SAN_KINDS) for san in sans):
        raise AuthFileError(f"{where}: san begins with none of {', '.join(SAN_KINDS)}")
    if not digests and not sans:
        raise AuthFileError(f"{where}: has neither token_sha256 nor san")
    if unknown := sorted(set(scopes) - SCOPES):
        raise AuthFileError(f"{where}: no such scope: {', '.join(unknown)}")
    limits = [entry.get(key, 0) for key in _LIMITS]
    for key, limit in zip(_LIMITS, limits, strict=True):
        if type(limit) is not int or not 0 <= limit <= MAX_REQUESTS:
            raise AuthFileError(f"{where}: {key} is not 0 to {MAX_REQUESTS}")
    plain = tuple(san.partition(":")[2] for san in sans)
    return Principal(name, tenant, frozenset(scopes), tuple(map(bytes.fromhex, digests)), plain, *limits)


def _texts(where: str, entry: Mapping[str, Any], key: str) -> list[str]:
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise AuthFileError(f"{where}: {key} is no list of texts")
    return value


class Authenticator:
    """The guard's check. Made with a file that is right; a wrong one later leaves the old one in force."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = file_stamp(path)
        self.principals = read_principals(path)
        self.on_refused: Callable[[], object] = lambda: None  # a new file was refused, the old one stays
        self._quotas: dict[str, Quota] = {}  # by principal; kept over reloads, since their calls go on

    def check(self, call: Call, context: Any) -> None:
        """Fills in who calls; raises Failure for nobody, and for one who may not."""
        principal = self._caller(context)
        if principal is None:
            raise errors.bad_credentials()
        call.principal, call.tenant, call.scopes = principal.name, principal.tenant, principal.scopes
        call.quota = self._quota_of(principal)
        scope = _SCOPE_OF_SERVICE.get(call.method.rpartition("/")[0], "admin")
        if scope and scope not in principal.scopes:
            raise errors.missing_scope(scope)

    def _quota_of(self, principal: Principal) -> Quota:
        quota = self._quotas.setdefault(principal.name, Quota())
        quota.limit(principal.max_active_requests, principal.max_queued_requests)
        return quota

    async def keep_up(self) -> None:
        """Reads the file again whenever it has changed; runs until it is cancelled."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            try:
                await asyncio.to_thread(self.reload)
            except Exception:  # a bug of ours: without the next look a token taken away would stay good
                log.exception("event=auth_reload_failed")

    def reload(self) -> bool:
        """Reads the file if it has changed; whether the principals are new."""
        stamp = file_stamp(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.principals = read_principals(self._path)
        except AuthFileError as error:
            self.on_refused()
            log.error('event=auth_file_refused kept=old why="%s"', error)
            return False
        log.info("event=auth_file_read principals=%d", len(self.principals))
        return True

    def _caller(self, context: Any) -> Principal | None:
        (given,) = metadata_values(context, ("authorization",))
        if given:  # who shows a token is judged by it alone
            token = given.removeprefix(_BEARER)
            is_token = given.startswith(_BEARER) and 0 < len(token) <= MAX_TOKEN_LENGTH
            return self.principals.of_token(token) if is_token else None
        if not self.principals.use_certificates:
            return None
        names = context.auth_context().get("x509_subject_alternative_name", ())
        return self.principals.of_certificate([name.decode(errors="replace") for name in names])
