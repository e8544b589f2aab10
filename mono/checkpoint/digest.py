"""One number for a checkpoint's content, whatever files it is spread over."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mono.checkpoint.shards import Entry

_CHUNK = 1 << 22


def digest(config: Mapping[str, Any], entries: Iterable[Entry], drafter: str | None = None) -> str:
    """SHA-256, in hex, of these lines, each ended by a line feed:

        mono checkpoint 1
        the configuration as JSON, keys sorted, no spaces, ASCII
        ["name", "dtype", [shape], "SHA-256 of the bytes"] as JSON, for every tensor, sorted by stored name
        the drafter's digest, if there is a drafter

    It depends on every name, dtype, shape and byte and on every value of the configuration; not on how the
    tensors are spread over files, their order in a file, or the layout of the JSON. Bytes are read in pieces
    of 4 MiB, several tensors at a time.
    """
    ordered = sorted(entries, key=lambda entry: entry.stored)
    total = hashlib.sha256(b"mono checkpoint 1\n")
    total.update(_line(config))
    with ThreadPoolExecutor() as pool:
        for entry, content in zip(ordered, pool.map(_content, ordered), strict=True):
            total.update(_line([entry.stored, entry.dtype, list(entry.shape), content]))
    if drafter is not None:
        total.update(_line(drafter))
    return total.hexdigest()


def _line(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _content(entry: Entry) -> str:
    content = hashlib.sha256()
    with entry.file.open("rb") as opened:
        opened.seek(entry.start)
        left = entry.stop - entry.start
        while left:
            piece = opened.read(min(left, _CHUNK))
            if not piece:
                raise OSError(f"{entry}: expected {left} more bytes, the file has shrunk since it was opened")
            content.update(piece)
            left -= len(piece)
    return content.hexdigest()
