"""Read a configuration field by field, trusting nothing about it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from mono.checkpoint.errors import CheckpointError

T = TypeVar("T")

_REQUIRED: Any = object()


class Fields:
    """Checked access to one object of a `config.json`.

    where:   file and path of the object, which begin every error.
    Every reader raises CheckpointError for a missing field that has no default, another type or another
    range. A field that is null counts as missing.
    """

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = values

    def inner(self, name: str) -> Fields:
        """The object in field `name`."""
        return Fields(f"{self.where}.{name}", self._typed(name, dict, "an object", _REQUIRED))

    def integer(self, name: str, least: int = 1, default: int = _REQUIRED) -> int:
        """An integer of at least `least`."""
        value: int = self._typed(name, int, "an integer", default)
        if value < least:
            raise self.wrong(name, f"at least {least}", value)
        return value

    def number(self, name: str, default: float = _REQUIRED) -> float:
        """A positive number."""
        value: float = self._typed(name, (int, float), "a number", default)
        if not 0.0 < value <= sys.float_info.max:  # an integer may be longer than any float
            raise self.wrong(name, "a positive number", value)
        return float(value)

    def switch(self, name: str, default: bool = _REQUIRED) -> bool:
        """True or false."""
        value: bool = self._typed(name, bool, "true or false", default)
        return value

    def text(self, name: str, default: str | None = _REQUIRED) -> str | None:
        """A string, or its default."""
        value: str | None = self._typed(name, str, "a string", default)
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers."""
        value = self._typed(name, list, "a list", _REQUIRED)
        if not all(type(v) is int for v in value):
            raise self.wrong(name, "a list of integers", value)
        return tuple(value)

    def per_layer(self, name: str, layers: int) -> tuple[bool, ...]:
        """A list of integers, one per layer; true where nonzero."""
        value = self.integers(name)
        if len(value) != layers:
            raise self.wrong(name, f"{layers} integers, one per layer", value)
        return tuple(v != 0 for v in value)

    def only(self, name: str, supported: object, default: Any = _REQUIRED) -> None:
        """The one value that is supported."""
        value = self._get(name, default)
        if type(value) is not type(supported) or value != supported:
            raise self.wrong(name, f"{supported!r}, the one supported value", value)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def wrong(self, name: str, expected: str, got: object) -> CheckpointError:
        """The error for field `name`."""
        return CheckpointError(f"{self.where}.{name}: expected {expected}, got {got!r:.100}")

    def _get(self, name: str, default: Any) -> Any:
        if self.has(name):
            return self.values[name]
        if default is _REQUIRED:
            raise CheckpointError(f"{self.where}.{name}: missing")
        return default

    def _typed(self, name: str, kind: Any, words: str, default: Any) -> Any:
        value = self._get(name, default)
        if value is default:
            return value
        # bool is an int in Python, not in a configuration
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(name, words, value)
        return value
