"""Models of the Hugging Face hub, through huggingface_hub where it is installed.

Owns which files of a repository are wanted. Uses the hub's own cache and credentials.
"""

from pathlib import Path

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.files import ModelFiles, ModelKind
from kvatlas.models.progress import FetchProgress, Progress

_WANTED = [
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
]


def fetch_hub(name: str, repository: str, cache: Path | None, progress: Progress) -> ModelFiles:
    """The folder of a repository's snapshot; fetched where it is not there yet."""
    repository, _, revision = repository.partition("@")
    progress(FetchProgress(repository, "download", 0, 0))
    folder = _snapshot(repository, revision or None, cache)
    if not (folder / "config.json").is_file():
        raise ModelError(ModelErrorReason.FILE_MISSING, f"hf:{repository} has no config.json")
    # The hub names a snapshot's folder by its commit.
    return ModelFiles(ModelKind.FOLDER, name, repository, folder.name, folder)


def _snapshot(repository: str, revision: str | None, cache: Path | None) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ModelError(
            ModelErrorReason.MISSING_DEPENDENCY,
            f"hf:{repository} needs huggingface_hub; install it with: pip install 'kvatlas[hub]'",
        ) from error
    try:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision,
            cache_dir=None if cache is None else cache / "hub",
            allow_patterns=_WANTED,
        )
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise ModelError(ModelErrorReason.UNKNOWN_MODEL, f"hf:{repository}: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError) as error:
        raise ModelError(
            ModelErrorReason.NO_NETWORK, f"hf:{repository} is not in the cache and the hub is not reachable"
        ) from error
    except errors.HfHubHTTPError as error:
        raise ModelError(ModelErrorReason.FETCH_FAILED, f"hf:{repository}: {error}") from error
    except OSError:  # of the disk: whoever starts a process says which
        raise
    except Exception as error:  # of the transport: another library in each major version
        raise ModelError(ModelErrorReason.FETCH_FAILED, f"hf:{repository}: {error!r}") from error
    return Path(folder)
