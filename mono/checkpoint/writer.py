"""Write a checkpoint folder, whole or not at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torch import contiguous_format as contiguous

from mono.checkpoint.errors import CheckpointError
from mono.checkpoint.shards import INDEX


def write_checkpoint(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    shard_bytes: int = 5_000_000_000,
    drafter: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None = None,
) -> None:
    """A folder that `load_checkpoint` opens: config.json and safetensors files, with an index if several.

    tensors:      written in the order given; a new file begins where `shard_bytes` would be exceeded. A
                  tensor is never split, so a larger one has a file of its own.
    drafter:      configuration and tensors of the `dspark/` subfolder, if there is one.

    Everything is written to a temporary folder beside `path` and renamed at the end, so a folder of that
    name is whole. Nothing is overwritten.
    Errors:       CheckpointError if `path` exists or there are no tensors; ValueError if shard_bytes < 1.
    """
    path = Path(path)
    if path.exists():
        raise CheckpointError(f"{path}: expected a new path, it exists")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        _write_folder(temporary, config, tensors, shard_bytes)
        if drafter is not None:
            _write_folder(temporary / "dspark", *drafter, shard_bytes)
        temporary.chmod(0o755)  # mkdtemp makes it the owner's alone
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def _write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], shard_bytes: int
) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, allow_nan=False) + "\n")
    shards = _shards(folder, tensors, shard_bytes)
    names = [f"model-{k:05}-of-{len(shards):05}.safetensors" for k in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        # copies, for safetensors refuses tensors that share memory
        own = {key: tensor.detach().cpu().clone(memory_format=contiguous) for key, tensor in shard.items()}
        save_file(own, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes: expected at least 1, got {shard_bytes}")
    if not tensors:
        raise CheckpointError(f"{folder.name}: expected at least one tensor, got none")
    shards: list[dict[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if not shards or size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards
