"""A config.json with typed access. Knows JSON's kinds and no key."""

from collections.abc import Mapping
from sys import float_info

from kvatlas.models.errors import ModelError, ModelErrorReason

MOST = 2**31 - 1  # of any size in a config.json


class Values:
    """A config.json with typed access; complains in the file's own words."""

    def __init__(self, raw: Mapping[str, object], where: str) -> None:
        self.raw = raw
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def integer(self, key: str) -> int:
        """A positive whole number that must be there."""
        value = self.raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            raise self.invalid(key, "a positive whole number")
        return value

    def optional_integer(self, key: str, default: int | None) -> int | None:
        """The same, or the default where the key is absent. An explicit null means None."""
        if key not in self.raw:
            return default
        return None if self.raw[key] is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; must be there where no default is given."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= float_info.max:
            raise self.invalid(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.invalid(key, "true or false")
        return value

    def invalid(self, key: str, expected: str) -> ModelError:
        """The error for a value of the wrong kind."""
        found = f"is {self.raw[key]!r}" if key in self.raw else "is missing"
        return ModelError(
            ModelErrorReason.INVALID_CONFIG, f"{self.where}: {key} {found}, expected {expected}"
        )
