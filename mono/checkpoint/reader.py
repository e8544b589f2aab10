"""Open a checkpoint folder of the field's layout, and read one tensor or one matrix of it at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mono.checkpoint.digest import digest
from mono.checkpoint.errors import CheckpointError
from mono.checkpoint.names import DRAFTER_PREFIX, canonical
from mono.checkpoint.quantisation import Quantisation
from mono.checkpoint.shards import DTYPES, Entry, read_bytes, read_folder, read_json
from mono.checkpoint.stored import SUFFIXES, Found, find, read
from mono.formats import Matrix


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint: its configuration and its files' headers; no tensor is read yet.

    path:    a folder with `config.json`; `model.safetensors`, or `model-0000k-of-0000n.safetensors` and
             `model.safetensors.index.json`; for a drafter a subfolder `dspark/` of the same layout, whose
             tensors may also lie in the folder's own files, under `language_model.model.dspark.`.
    Errors:  CheckpointError for a missing or unreadable file, a truncated one, an index that does not fit the
             files, a tensor in two places, or a quantisation method that is not known.
    """
    try:
        return _load(Path(path))
    except OSError as error:
        where = error.filename or path
        raise CheckpointError(f"{where}: expected a readable file, got {error.strerror}") from error


def _load(folder: Path) -> Checkpoint:
    config = read_json(folder / "config.json")
    entries = read_folder(folder)
    if not entries:
        raise CheckpointError(f"{folder}: expected *.safetensors files, there are none")
    target = [entry for entry in entries if not canonical(entry.stored).startswith(DRAFTER_PREFIX)]
    drafts = [entry for entry in entries if canonical(entry.stored).startswith(DRAFTER_PREFIX)]

    drafter = None
    if (folder / "dspark").is_dir():
        drafts += read_folder(folder / "dspark")
        if not drafts:
            raise CheckpointError(f"{folder / 'dspark'}: expected the drafter's tensors, there are none")
        drafter = Checkpoint(folder / "dspark", read_json(folder / "dspark" / "config.json"), drafts)
    elif drafts:
        raise CheckpointError(f"{drafts[0]}: expected {folder / 'dspark' / 'config.json'} beside a drafter")
    return Checkpoint(folder, config, target, drafter)


class Checkpoint:
    """An open checkpoint. Tensors go by their canonical names (`mono.checkpoint.names`).

    path:           its folder.
    config:         `config.json`.
    text_config:    the part of it about the text decoder; the whole of it in a text-only checkpoint.
    quantisation:   what it says about formats.
    entries:        where each tensor lies, by canonical name; the drafter's are not among them.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        entries: Iterable[Entry],
        drafter: Checkpoint | None = None,
    ) -> None:
        self.path = path
        self.config = config
        self.text_config = _text_config(path, config)
        self.quantisation = Quantisation.of(path / "config.json", config, self.text_config)
        self.entries: Mapping[str, Entry] = _by_name(entries)
        self._drafter = drafter

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names of all tensors, sorted."""
        return tuple(sorted(self.entries))

    @property
    def drafter_config(self) -> dict[str, Any] | None:
        """The drafter's `config.json`, or None without a drafter."""
        return None if self._drafter is None else self._drafter.config

    def drafter(self) -> Checkpoint | None:
        """The drafter as a checkpoint of its own, names without `language_model.model.dspark.`; or None."""
        return self._drafter

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, the drafter's included (`mono.checkpoint.digest`). Reads every byte."""
        drafter = None if self._drafter is None else self._drafter.digest
        return digest(self.config, self.entries.values(), drafter)

    def entry(self, name: str) -> Entry:
        """Where the tensor `name` lies, or CheckpointError if it is missing."""
        if name not in self.entries:
            raise CheckpointError(f"{self.path}: {name}: missing")
        return self.entries[name]

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`, on the CPU, in memory of its own.

        Errors:  CheckpointError if it is missing, or holds a NaN or an infinity. E8M0 bytes are not floats
                 here: a tensor of that dtype is returned as uint8.
        """
        entry = self.entry(name)
        dtype = torch.uint8 if entry.dtype == "F8_E8M0" else DTYPES[entry.dtype]
        stored = read_bytes(entry).view(dtype).view(entry.shape)
        if dtype.is_floating_point:
            # e4m3 has no infinity, and few operations take it directly
            bad = stored.isnan() if entry.dtype.startswith("F8") else ~stored.isfinite()
            if count := int(bad.sum()):
                raise CheckpointError(
                    f"{entry}: expected finite values, got {count} NaN or infinite of {stored.numel()}"
                )
        return stored

    def find(self, prefix: str) -> Found:
        """The format and logical shape of the matrix under `prefix`, from the headers alone.

        Errors:  CheckpointError if there is none, its tensors fit no known format, their shapes do not fit
                 each other, or `quantization_config` contradicts them.
        """
        parts = {
            suffix: self.entries[f"{prefix}.{suffix}"]
            for suffix in SUFFIXES
            if f"{prefix}.{suffix}" in self.entries
        }
        if not parts:
            raise CheckpointError(f"{self.path}: {prefix}.weight: missing")
        found = find(prefix, parts)
        self.quantisation.check(found)
        return found

    def matrix(self, prefix: str) -> Matrix:
        """The matrix under `prefix`, as it is stored; see `mono.checkpoint.stored` for the formats.

        Errors:  CheckpointError, naming the tensor, as `find` and `tensor`; also for an E8M0 byte 255 (NaN),
                 a negative block scale, and a PTPC or global scale that is not positive.
        """
        found = self.find(prefix)
        return read(found, {suffix: self.tensor(f"{prefix}.{suffix}") for suffix in found.parts})


def _text_config(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    text_config = config.get("text_config", config)
    if not isinstance(text_config, dict):
        raise CheckpointError(
            f"{path / 'config.json'}: text_config: expected an object, got {type(text_config).__name__}"
        )
    return text_config


def _by_name(entries: Iterable[Entry]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for entry in entries:
        name = canonical(entry.stored).removeprefix(DRAFTER_PREFIX)
        if name in found:
            raise CheckpointError(f"{entry}: expected once, {found[name]} is the same tensor")
        found[name] = entry
    return found
