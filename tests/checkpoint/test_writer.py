"""A checkpoint is written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mono.checkpoint import CheckpointError, load_checkpoint, write_checkpoint, writer

TENSORS = {f"t{i}": torch.full((4,), float(i)) for i in range(5)}  # 16 bytes each


def test_shards_are_filled_in_order(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", {}, TENSORS | {"big": torch.zeros(100)}, shard_bytes=40)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    files = [f"model-{k:05}-of-00004.safetensors" for k in (1, 1, 2, 2, 3, 4)]
    assert index["weight_map"] == dict(zip([*TENSORS, "big"], files, strict=True))
    assert index["metadata"]["total_size"] == 5 * 16 + 400


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", {}, TENSORS)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["config.json", "model.safetensors"]


def test_views_are_written_as_they_read(tmp_path: Path) -> None:
    table = torch.arange(12.0).reshape(3, 4)
    write_checkpoint(tmp_path / "c", {}, {"rows": table[1:], "turned": table.T, "again": table[1:]})
    checkpoint = load_checkpoint(tmp_path / "c")
    assert torch.equal(checkpoint.tensor("turned"), table.T)
    assert torch.equal(checkpoint.tensor("rows"), checkpoint.tensor("again"))


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", {"first": 1}, TENSORS)
    with pytest.raises(CheckpointError, match=r"c: expected a new path, it exists$"):
        write_checkpoint(tmp_path / "c", {"second": 2}, TENSORS)
    assert load_checkpoint(tmp_path / "c").config == {"first": 1}


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def fail_at_the_second(tensors: object, file: Path, metadata: object) -> None:
        written.append(file.name)
        if len(written) == 2:
            raise OSError("disk full")

    monkeypatch.setattr(writer, "save_file", fail_at_the_second)
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path / "c", {}, TENSORS, shard_bytes=16)
    assert len(written) == 2
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected at least one tensor, got none"):
        write_checkpoint(tmp_path / "c", {}, {})
    with pytest.raises(ValueError, match="shard_bytes: expected at least 1, got 0"):
        write_checkpoint(tmp_path / "c", {}, TENSORS, shard_bytes=0)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_checkpoint(tmp_path / "c", {"a": float("nan")}, TENSORS)
    assert list(tmp_path.iterdir()) == []
