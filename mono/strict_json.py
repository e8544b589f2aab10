"""Read a small JSON file that nobody vouches for: one checked value, or one line that says what is wrong.

A reader takes a field's path and its parsed value and returns what it means, or raises CertificateError.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

MOST_BYTES = 1 << 20  # a certificate for a stack of 122 slots takes some 20 KiB
MOST_NESTING = 8  # its schema needs 4
MOST_TEXT = 200
DATE = "%Y-%m-%dT%H:%M:%SZ"

Reader = Callable[[str, Any], Any]


class CertificateError(ValueError):
    """A certificate that cannot be issued or read, or that is not what it says; one line."""


def content(path: str | Path) -> bytes:
    """The bytes of a regular file of at most MOST_BYTES."""
    try:
        # no link is followed and no pipe waited for; what was opened is what is then examined
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CertificateError("expected a regular file, got a symbolic link") from None
        raise CertificateError(f"expected a readable file: {error.strerror}") from None
    except (TypeError, ValueError) as error:
        raise CertificateError(f"expected the path of a file: {error}") from None
    try:
        mode = os.fstat(file).st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "a pipe or a device"
            raise CertificateError(f"expected a regular file, got {kind}")
        with open(file, "rb", closefd=False) as opened:
            found = opened.read(MOST_BYTES + 1)
    finally:
        os.close(file)
    if len(found) > MOST_BYTES:
        raise CertificateError(f"expected at most {MOST_BYTES} bytes, got more")
    return found


def parse(found: bytes) -> Any:
    """The JSON value of these bytes: UTF-8, at most MOST_NESTING deep, no name twice, no NaN or infinity."""
    try:
        text = found.decode()
    except UnicodeDecodeError as error:
        raise CertificateError(f"expected UTF-8, got byte {found[error.start]} at {error.start}") from None
    depth = 0
    # a string is stepped over whole, closed or not, so this takes one pass whatever the text
    for bracket in re.findall(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', text, re.DOTALL):
        if bracket[0] == '"':
            continue
        depth += 1 if bracket in "[{" else -1
        if depth > MOST_NESTING:
            raise CertificateError(f"expected JSON nested at most {MOST_NESTING} deep, got deeper")
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except CertificateError:
        raise
    except ValueError as error:
        raise CertificateError(f"expected JSON: {error}") from None


def an_object(where: str, value: Any, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """The fields of an object, each by its reader: none unknown, none missing."""
    if type(value) is not dict:
        raise _wrong(where or "certificate", "an object", value)
    at = f"{where}." if where else ""
    for name in value:
        if name not in readers:
            raise CertificateError(f"{at}{name!r:.60}: unknown field")
    for name in readers:
        if name not in value:
            raise CertificateError(f"{at}{name}: missing")
    return {name: reader(f"{at}{name}", value[name]) for name, reader in readers.items()}


def text(where: str, value: Any) -> str:
    """Printable, so that it can be shown on any terminal."""
    if type(value) is not str or not (
        0 < len(value) <= MOST_TEXT and value.isascii() and value.isprintable()
    ):
        raise _wrong(where, f"1 to {MOST_TEXT} printable ASCII characters", value)
    return str(value)


def digest(where: str, value: Any) -> str:
    """A SHA-256 in hex."""
    if type(value) is not str or not re.fullmatch("[0-9a-f]{64}", value):
        raise _wrong(where, "64 hexadecimal digits", value)
    return value


def date(where: str, value: Any) -> datetime:
    """To the second, in UTC."""
    if type(value) is str and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", value, re.ASCII):
        try:
            return datetime.strptime(value, DATE).replace(tzinfo=UTC)
        except ValueError:
            pass
    raise _wrong(where, "a date as 2026-01-31T12:00:00Z", value)


def count(where: str, value: Any) -> int:
    """An integer of at least 0; true is none."""
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise _wrong(where, "a count", value)
    return value


def number(where: str, value: Any) -> float:
    """Finite, at least 0.0, written with a point."""
    if type(value) is not float or not math.isfinite(value) or value < 0:
        raise _wrong(where, "a finite number of at least 0.0", value)
    return value


def switch(where: str, value: Any) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise _wrong(where, "true or false", value)
    return value


def one_of(*allowed: str | int) -> Reader:
    """One of these."""

    def read_one(where: str, value: Any) -> str | int:
        for choice in allowed:
            if type(value) is type(choice) and value == choice:
                return choice
        raise _wrong(where, " or ".join(map(repr, allowed)), value)

    return read_one


def or_none(reader: Reader) -> Reader:
    """Null, or what `reader` reads."""
    return lambda where, value: None if value is None else reader(where, value)


def several(reader: Reader, length: int | None = None) -> Reader:
    """A list of what `reader` reads, as a tuple."""

    def read_several(where: str, value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != (len(value) if length is None else length):
            raise _wrong(where, "a list" if length is None else f"a list of {length}", value)
        return tuple(reader(f"{where}[{i}]", item) for i, item in enumerate(value))

    return read_several


def by_name(reader: Reader) -> Reader:
    """A list of [name, what `reader` reads], in order, no name twice."""

    def read_pair(where: str, value: Any) -> tuple[str, Any]:
        if type(value) is not list or len(value) != 2:
            raise _wrong(where, "a name and its value", value)
        return text(where, value[0]), reader(where, value[1])

    def read_pairs(where: str, value: Any) -> tuple[Any, ...]:
        pairs: tuple[tuple[str, Any], ...] = several(read_pair)(where, value)
        if len(dict(pairs)) < len(pairs):
            raise CertificateError(f"{where}: expected every name once, got one twice")
        return pairs

    return read_pairs


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise CertificateError(f"{name!r:.60}: expected once, got it twice")
        found[name] = value
    return found


def _no_number(name: str) -> NoReturn:
    raise CertificateError(f"expected finite numbers, got {name}")


def _wrong(where: str, expected: str, value: Any) -> CertificateError:
    return CertificateError(f"{where}: expected {expected}, got {value!r:.60}")
