"""The auth file: what is accepted, what is refused and in which words, and its renewal."""

import asyncio
import hashlib
import logging
import os
from pathlib import Path

import pytest

from service import auth as auth_module
from service.auth import Authenticator, AuthFileError, Principals, read_principals
from service.config import ConfigError, ServiceConfig

TOKEN, NEXT_TOKEN, FOREIGN_TOKEN = "token-of-a", "next-token-of-a", "nobodys-token"


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    aside = path.with_suffix(".new")  # replaced in one step, as editors and Kubernetes do
    aside.write_text(text)
    aside.chmod(mode)
    aside.replace(path)
    return path


def entry(*tokens: str, name: str = "team-a", more: str = "") -> str:
    digests = ", ".join(f'"{digest(token)}"' for token in tokens)
    head = f'[[principal]]\nname = "{name}"\ntenant = "a"\nscopes = ["generate"]\n'
    return f"{head}token_sha256 = [{digests}]\n{more}\n"


def test_a_token_is_found_by_its_digest_alone(tmp_path: Path) -> None:
    principals = read_principals(written(tmp_path / "auth.toml", entry(TOKEN, NEXT_TOKEN)))
    for token in (TOKEN, NEXT_TOKEN):
        found = principals.of_token(token)
        assert found is not None
        assert (found.name, found.tenant, found.scopes) == ("team-a", "a", {"generate"})
    assert principals.of_token(FOREIGN_TOKEN) is None
    assert principals.of_token(digest(TOKEN)) is None, "the digest is no token"


def test_a_principal_printed_by_accident_shows_no_digest(tmp_path: Path) -> None:
    found = read_principals(written(tmp_path / "auth.toml", entry(TOKEN))).of_token(TOKEN)
    assert digest(TOKEN) not in repr(found)
    assert hashlib.sha256(TOKEN.encode()).digest() not in repr(found).encode()


def test_certificates_are_found_by_any_of_their_names(tmp_path: Path) -> None:
    text = entry(TOKEN, more='san = ["dns:a.internal", "uri:spiffe://x/a"]')
    principals = read_principals(written(tmp_path / "auth.toml", text))
    assert principals.use_certificates
    assert principals.of_certificate(["other", "spiffe://x/a"]) is not None
    assert principals.of_certificate(["other"]) is None
    assert Principals([]).of_certificate(["a.internal"]) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no"),
        ("x = 1", "no such key: x"),
        ("[[principal]\n", "no TOML"),
        ("x = 1" + "0" * 5000, "no TOML"),
        ("principal = [1]", "no table"),
        (entry(TOKEN, name="two words"), "name is not"),
        (entry(TOKEN, more="colour = 1"), "no such key: colour"),
        (entry(TOKEN).replace('"a"', '"a\\u0000b"'), "tenant is not"),
        (entry(TOKEN).replace('["generate"]', '["everything"]'), "no such scope: everything"),
        (entry(TOKEN).replace(digest(TOKEN), TOKEN), "64 lower-case hex digits"),
        (entry(TOKEN).replace(f'["{digest(TOKEN)}"]', "7"), "no list of texts"),
        (entry(TOKEN, more="max_active_requests = -1"), "max_active_requests is not 0 to"),
        (entry(TOKEN, more="max_active_requests = true"), "max_active_requests is not 0 to"),
        (entry(TOKEN, more="max_queued_requests = -1"), "max_queued_requests is not 0 to"),
        (entry(TOKEN, more="max_queued_requests = 1048577"), "max_queued_requests is not 0 to 1048576"),
        (entry(), "neither token_sha256 nor san"),
        (entry(TOKEN, more='san = ["a.internal"]'), "begins with none of"),
        (entry(TOKEN) + entry(TOKEN, name="team-b"), "token of another principal"),
        (entry(TOKEN) + entry(NEXT_TOKEN), "two principals have one name"),
        (entry(TOKEN) + f'x = "{TOKEN}', "no TOML"),
        ("#" * (1 << 20) + "#", "larger than"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence_without_secrets(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(AuthFileError, match=words) as raised:
        read_principals(written(tmp_path / "auth.toml", text))
    assert TOKEN not in str(raised.value)
    assert digest(TOKEN) not in str(raised.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(AuthFileError, match="chmod 0600"):
        read_principals(written(tmp_path / "auth.toml", entry(TOKEN), mode))


def test_a_changed_file_is_read_and_a_wrong_one_leaves_the_old_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "auth.toml", entry(TOKEN))
    auth = Authenticator(path)
    refusals: list[int] = []
    auth.on_refused = lambda: refusals.append(1)
    assert not auth.reload(), "nothing has changed"
    written(path, entry(TOKEN, NEXT_TOKEN))
    assert auth.reload()
    assert auth.principals.of_token(NEXT_TOKEN) is not None
    with caplog.at_level(logging.ERROR):
        deep = f"{TOKEN[:8]} = {'[' * 5000}"  # the parser's own limit, which is no error of its kind
        for change in (lambda: written(path, f'oops = "{TOKEN}"'), lambda: written(path, deep), path.unlink):
            change()
            assert not auth.reload()
            assert not auth.reload(), "looked at once: it has not changed since"
    assert auth.principals.of_token(TOKEN) is not None
    assert refusals == [1, 1, 1]
    assert caplog.text.count("event=auth_file_refused") == 3
    assert TOKEN not in caplog.text
    written(path, entry(NEXT_TOKEN))
    assert auth.reload()
    assert auth.principals.of_token(TOKEN) is None, "taken away"


def test_a_file_that_others_may_read_from_now_on_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "auth.toml", entry(TOKEN))
    auth = Authenticator(path)
    path.chmod(0o644)
    with caplog.at_level(logging.ERROR):
        assert not auth.reload()
    assert "event=auth_file_refused kept=old" in caplog.text
    path.chmod(0o600)
    assert auth.reload()


def test_a_reload_that_fails_is_followed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The task ended without a word, and a token that was taken away stayed good for ever."""
    path = written(tmp_path / "auth.toml", entry(TOKEN))
    auth = Authenticator(path)
    monkeypatch.setattr(auth_module, "RELOAD_SECONDS", 0.01)
    failures = [MemoryError(), ZeroDivisionError()]

    def refuse() -> None:
        if failures:
            raise failures.pop()

    auth.on_refused = refuse

    async def follow() -> None:
        keeping = asyncio.ensure_future(auth.keep_up())
        for number in range(2):
            left = len(failures)
            written(path, f"wrong = {number}")
            while len(failures) == left:
                await asyncio.sleep(0.005)
        written(path, entry(NEXT_TOKEN))
        while auth.principals.of_token(TOKEN) is not None:
            await asyncio.sleep(0.005)
        keeping.cancel()

    asyncio.run(asyncio.wait_for(follow(), 100))
    assert auth.principals.of_token(NEXT_TOKEN) is not None
    assert caplog.text.count("event=auth_reload_failed") == 2


def test_tokens_in_plaintext_stay_on_the_loopback(tmp_path: Path) -> None:
    auth = str(written(tmp_path / "auth.toml", entry(TOKEN)))
    pem = str(written(tmp_path / "pem", "x"))
    with pytest.raises(ConfigError, match="plaintext and not loopback"):
        ServiceConfig(address="0.0.0.0:50051", auth_file=auth)
    assert ServiceConfig(address="127.0.0.1:50051", auth_file=auth).auth_file == auth
    assert ServiceConfig(address="0.0.0.0:50051", auth_file=auth, tls_certificate=pem, tls_key=pem).tls_key
    with pytest.raises(ConfigError, match="asks for no certificate"):
        ServiceConfig(admin_address="0.0.0.0:50052", auth_file=auth, tls_certificate=pem, tls_key=pem)
    assert ServiceConfig(
        admin_address="0.0.0.0:50052", tls_certificate=pem, tls_key=pem, tls_client_ca=pem
    ).admin_address


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"auth_file": "/nowhere"}, "auth_file: no file"),
        ({"tls_certificate": os.devnull}, "one without the other"),
        ({"tls_client_ca": os.devnull}, "needs tls_certificate"),
    ],
)
def test_half_of_a_configuration_is_refused(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServiceConfig(**settings)  # type: ignore[arg-type]
