"""Who a call is of, by its metadata and its certificate, and which limits it then has."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from service.auth import MAX_TOKEN_LENGTH, Authenticator
from service.errors import Failure
from service.request import Call

METHOD = "/kvatlas.v1.GenerationService/Generate"
LONGEST, TOO_LONG = "t" * MAX_TOKEN_LENGTH, "t" * (MAX_TOKEN_LENGTH + 1)


class _Context:
    """A call that shows a token, a certificate with these names, or both."""

    def __init__(self, authorization: str = "", sans: Sequence[bytes] = ()) -> None:
        self._authorization = authorization
        self._sans = sans

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return (("authorization", self._authorization),) if self._authorization else ()

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return {"x509_subject_alternative_name": self._sans}


def auth_file(path: Path, *, most: int = 2) -> Path:
    tokens = ", ".join(f'"{hashlib.sha256(token.encode()).hexdigest()}"' for token in (LONGEST, TOO_LONG))
    aside = path.with_suffix(".new")
    aside.touch(mode=0o600)
    aside.write_text(
        f'[[principal]]\nname = "a"\nscopes = ["generate"]\ntoken_sha256 = [{tokens}]\n'
        f'san = ["dns:a.internal"]\nmax_active_requests = {most}\n'
    )
    aside.replace(path)
    return path


@pytest.fixture
def auth(tmp_path: Path) -> Authenticator:
    return Authenticator(auth_file(tmp_path / "auth.toml"))


def reason_of(auth: Authenticator, context: _Context, method: str = METHOD) -> str:
    """Why a call is refused; empty: it is let in."""
    call = Call(method)
    try:
        auth.check(call, context)
    except Failure as failure:
        return failure.reason
    assert call.principal == "a"
    return ""


def test_the_longest_token_is_looked_up_and_a_longer_one_is_not(auth: Authenticator) -> None:
    assert reason_of(auth, _Context(f"Bearer {LONGEST}")) == ""
    assert reason_of(auth, _Context(f"Bearer {TOO_LONG}")) == "BAD_CREDENTIALS"


@pytest.mark.parametrize("given", ["Bearer nobodys", "Bearer ", f"bearer {LONGEST}", LONGEST, "Basic YTpi"])
def test_who_shows_a_wrong_token_is_not_saved_by_a_certificate(auth: Authenticator, given: str) -> None:
    assert reason_of(auth, _Context(given, [b"a.internal"])) == "BAD_CREDENTIALS"
    assert reason_of(auth, _Context(sans=[b"a.internal"])) == ""


def test_any_name_of_a_certificate_will_do(auth: Authenticator) -> None:
    assert reason_of(auth, _Context(sans=[b"\xff", b"other", b"a.internal"])) == ""
    assert reason_of(auth, _Context(sans=[b"other"])) == "BAD_CREDENTIALS"
    assert reason_of(auth, _Context()) == "BAD_CREDENTIALS"


def test_a_new_limit_holds_for_who_has_requests_in_progress(
    auth: Authenticator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = _Context(f"Bearer {LONGEST}")
    call = Call(METHOD)
    auth.check(call, context)
    assert call.quota is not None
    call.quota.enter()
    auth_file(tmp_path / "auth.toml", most=1)
    with caplog.at_level(logging.INFO):
        assert auth.reload()
    assert "event=auth_file_read principals=1" in caplog.text
    later = Call(METHOD)
    auth.check(later, context)
    assert later.quota is not None
    assert later.quota.full() == ("max_active_requests", 1)
