"""Which tensor lies in which file, from the headers alone: nothing is read that is not looked up."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mono.checkpoint.errors import CheckpointError

INDEX = "model.safetensors.index.json"
MOST_HEADER = 100_000_000  # bytes, the format's own limit

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored tensor.

    stored:       its name in the file.
    dtype:        the file's word for it, such as `BF16`; a key of DTYPES.
    start, stop:  its bytes, counted from the beginning of the file.
    """

    file: Path
    stored: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.file}: {self.stored}"


def read_folder(folder: Path) -> list[Entry]:
    """Every tensor of a folder, checked against the folder's index where it has one.

    Without an index every `*.safetensors` file of the folder is read.
    Errors:  CheckpointError for an index that names a missing file, a tensor the file does not hold or a
             file beside the folder; a tensor that the index leaves out; a name held by two files; and for
             every file what `read_header` finds.
    """
    index = folder / INDEX
    if not index.is_file():
        return _unique(entry for file in sorted(folder.glob("*.safetensors")) for entry in read_header(file))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(
            f"{index}: weight_map: expected an object of file names, got {weight_map!r:.80}"
        )
    for name, file_name in weight_map.items():
        if Path(file_name).name != file_name or not (folder / file_name).is_file():
            raise CheckpointError(f"{index}: {name}: expected in {file_name!r}, no such file in the folder")
    files = sorted(set(weight_map.values()))
    entries = _unique(entry for file_name in files for entry in read_header(folder / file_name))
    for entry in entries:
        if weight_map.get(entry.stored) != entry.file.name:
            got = weight_map.get(entry.stored, "nothing")
            raise CheckpointError(f"{entry}: expected in the index under {entry.file.name!r}, got {got!r}")
    if missing := sorted(weight_map.keys() - {entry.stored for entry in entries}):
        name = missing[0]
        raise CheckpointError(f"{folder / weight_map[name]}: {name}: expected by the index, not in the file")
    return entries


def read_header(file: Path) -> list[Entry]:
    """The tensors of one safetensors file.

    Layout:  8 bytes n, little endian; n bytes of JSON; then the data, whose offsets count from its start.
    Errors:  CheckpointError if the header is cut short, longer than the format allows or no JSON object, a
             dtype is unknown, a byte range does not fit its dtype and shape or is not inside the file, or the
             data has gaps, overlaps or a surplus.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        prefix = opened.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or 8 + length > size:
            raise CheckpointError(f"{file}: truncated: expected a header of {length} bytes, file has {size}")
        if length > MOST_HEADER:
            raise CheckpointError(f"{file}: expected a header of at most {MOST_HEADER} bytes, got {length}")
        text = opened.read(length)
    header = parse_object(text, file)
    header.pop("__metadata__", None)
    data = 8 + length
    entries = sorted((_entry(file, name, fields, data) for name, fields in header.items()), key=_by_place)
    at = data
    for entry in entries:
        if entry.stop > size:
            raise CheckpointError(f"{entry}: truncated: expected bytes up to {entry.stop}, file has {size}")
        if entry.start != at:
            raise CheckpointError(f"{entry}: expected to start at byte {at}, got {entry.start}")
        at = entry.stop
    if at != size:
        raise CheckpointError(f"{file}: expected {at} bytes, got {size}")
    return entries


def read_bytes(entry: Entry) -> Tensor:
    """The bytes of one stored tensor, [n] uint8 in memory of their own.

    By the place that `read_header` checked, whatever else a header says.
    Errors:  CheckpointError if the file can no longer be read, or has shrunk since.
    """
    content = torch.empty(entry.stop - entry.start, dtype=torch.uint8)
    try:
        with entry.file.open("rb") as opened:
            opened.seek(entry.start)
            got = opened.readinto(content.numpy())  # type: ignore[arg-type]  # an array is a buffer
    except OSError as error:
        raise CheckpointError(f"{entry}: expected a readable file, got {error.strerror}") from error
    if got != len(content):
        raise CheckpointError(f"{entry}: truncated: expected {len(content)} bytes, got {got}")
    return content


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, or CheckpointError."""
    if not file.is_file():
        raise CheckpointError(f"{file}: expected a file, there is none")
    return parse_object(file.read_bytes(), file)


def parse_object(text: bytes, file: Path) -> dict[str, Any]:
    """A JSON object with no key twice, or CheckpointError naming `file`."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise CheckpointError(f"{file}: {twice}: expected once, got {keys.count(twice)} times")
        return found

    try:
        parsed = json.loads(text, object_pairs_hook=once)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, an endless number or nesting
        raise CheckpointError(f"{file}: expected JSON, got {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(parsed).__name__}")
    return parsed


def _entry(file: Path, name: str, fields: Any, data: int) -> Entry:
    match fields:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if all(
            isinstance(n, int) and n >= 0 for n in shape
        ):
            pass
        case _:
            raise CheckpointError(
                f"{file}: {name}: expected dtype, shape and data_offsets, got {fields!r:.80}"
            )
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: {name}: expected a dtype of {sorted(DTYPES)}, got {dtype!r}")
    wanted = math.prod(shape) * DTYPES[dtype].itemsize
    if start < 0 or stop - start != wanted:
        raise CheckpointError(
            f"{file}: {name}: expected {wanted} bytes for {dtype} {shape}, got offsets {start} to {stop}"
        )
    return Entry(file, name, dtype, tuple(shape), data + start, data + stop)


def _by_place(entry: Entry) -> tuple[int, int]:
    return entry.start, entry.stop


def _unique(entries: Iterable[Entry]) -> list[Entry]:
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.stored in found:
            raise CheckpointError(f"{entry}: expected in one file, also in {found[entry.stored].file.name}")
        found[entry.stored] = entry
    return list(found.values())
