"""The digest sees content and nothing else."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.make import make
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mono.checkpoint import load_checkpoint, write_checkpoint

CONFIG: dict[str, Any] = {"b": 1e-6, "a": [1, {"y": None, "x": "ü"}]}
TENSORS = {
    "one": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
    "two": torch.linspace(-1, 1, 5).bfloat16(),
    "three": torch.tensor(3.5),
}


def digest(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], **options: Any) -> str:
    write_checkpoint(folder, config, tensors, **options)
    return load_checkpoint(folder).digest


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest(tmp_path_factory.mktemp("base") / "c", CONFIG, TENSORS)


def test_it_is_the_documented_sum(base: str) -> None:
    lines = [
        b"mono checkpoint 1",
        rb'{"a":[1,{"x":"\u00fc","y":null}],"b":1e-06}',
        *(
            json.dumps([name, dtype, list(t.shape), content(t)], separators=(",", ":")).encode()
            for name, dtype, t in sorted(
                [
                    ("one", "U8", TENSORS["one"]),
                    ("two", "BF16", TENSORS["two"]),
                    ("three", "F32", TENSORS["three"]),
                ],
                key=lambda line: line[0],
            )
        ),
    ]
    assert base == hashlib.sha256(b"".join(line + b"\n" for line in lines)).hexdigest()


def content(tensor: Tensor) -> str:
    return hashlib.sha256(bytes(tensor.reshape(-1).view(torch.uint8).tolist())).hexdigest()


@pytest.mark.parametrize("shard_bytes", [1, 10, 12, 10**9])
@pytest.mark.parametrize("backwards", [False, True])
def test_files_and_order_do_not_matter(tmp_path: Path, base: str, shard_bytes: int, backwards: bool) -> None:
    config = dict(reversed(CONFIG.items())) if backwards else CONFIG
    tensors = dict(reversed(TENSORS.items())) if backwards else TENSORS
    assert digest(tmp_path / "c", config, tensors, shard_bytes=shard_bytes) == base


@given(st.data())
def test_any_byte_matters(tmp_path_factory: pytest.TempPathFactory, base: str, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("byte") / "c"
    write_checkpoint(folder, CONFIG, TENSORS)
    file = folder / "model.safetensors"
    stored = bytearray(file.read_bytes())
    size = sum(tensor.nbytes for tensor in TENSORS.values())
    stored[-data.draw(st.integers(1, size))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(stored)
    assert load_checkpoint(folder).digest != base


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        (CONFIG | {"b": 2e-6}, TENSORS),
        (CONFIG | {"c": None}, TENSORS),
        (CONFIG, TENSORS | {"four": torch.zeros(0)}),
        (CONFIG, {("uno" if name == "one" else name): t for name, t in TENSORS.items()}),
        (CONFIG, TENSORS | {"one": TENSORS["one"].reshape(3, 2)}),
        (CONFIG, TENSORS | {"one": TENSORS["one"].view(torch.int8)}),
        (CONFIG, TENSORS | {"two": TENSORS["two"].view(torch.float16)}),
    ],
    ids=["config value", "config key", "one more", "name", "shape", "dtype int8", "dtype fp16"],
)
def test_everything_else_matters(
    tmp_path: Path, base: str, config: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    assert digest(tmp_path / "c", config, tensors) != base


def test_the_drafter_matters(tmp_path: Path) -> None:
    made = make(drafter=True)
    assert made.drafter is not None
    whole = load_checkpoint(made.write(tmp_path / "whole"))
    config, tensors = made.drafter
    made.drafter = (config, {name: t for name, t in tensors.items() if not name.endswith("fc.weight")})
    less = load_checkpoint(made.write(tmp_path / "less"))
    made.drafter = None
    none = load_checkpoint(made.write(tmp_path / "none"))
    assert len({whole.digest, less.digest, none.digest}) == 3


def test_a_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", CONFIG, TENSORS)
    checkpoint = load_checkpoint(tmp_path / "c")
    file = tmp_path / "c" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(OSError, match="the file has shrunk since it was opened"):
        _ = checkpoint.digest
