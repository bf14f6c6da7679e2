"""The one way in which a model cannot be had, with a reason that programs can read.

Owns the list of reasons. Knows nothing of how models are found or loaded.
"""

from enum import StrEnum


class ModelErrorReason(StrEnum):
    """Why a model could not be found, fetched or loaded. Names are stable."""

    UNKNOWN_SCHEME = "UNKNOWN_SCHEME"
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    FILE_MISSING = "FILE_MISSING"
    FILE_TRUNCATED = "FILE_TRUNCATED"
    FILE_CORRUPT = "FILE_CORRUPT"
    CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"
    NO_NETWORK = "NO_NETWORK"
    FETCH_FAILED = "FETCH_FAILED"
    CACHE_UNUSABLE = "CACHE_UNUSABLE"
    MISSING_DEPENDENCY = "MISSING_DEPENDENCY"
    INVALID_CONFIG = "INVALID_CONFIG"
    UNSUPPORTED_FORMAT = "UNSUPPORTED_FORMAT"
    UNSUPPORTED_ARCHITECTURE = "UNSUPPORTED_ARCHITECTURE"
    UNSUPPORTED_FEATURE = "UNSUPPORTED_FEATURE"
    UNSUPPORTED_ROPE = "UNSUPPORTED_ROPE"
    UNSUPPORTED_QUANTISATION = "UNSUPPORTED_QUANTISATION"
    UNSUPPORTED_DTYPE = "UNSUPPORTED_DTYPE"
    TENSOR_MISSING = "TENSOR_MISSING"
    TENSOR_SHAPE = "TENSOR_SHAPE"


class ModelError(Exception):
    """A model cannot be used; `reason` for programs, the text for people."""

    def __init__(self, reason: ModelErrorReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type["ModelError"], tuple[ModelErrorReason, str]]:
        return type(self), (self.reason, str(self))
