"""Run fast arms under the hardest conditions that a device allows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mono.fast import tiles
from mono.fast.interpreter import interpret

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
"""For tests that Hypothesis drives, which takes no fixtures of function scope."""

ORDERS = [None, "reverse", 7]
"""Orders of the programs of a launch: ascending, descending, shuffled."""


@contextlib.contextmanager
def strict(
    device: torch.device | str = "cpu", order: int | str | None = None, gpu_tiles: bool = False
) -> Iterator[None]:
    """Fresh memory is dirty; on the CPU, lanes that are off are poisoned, races and stray accesses raise.

    gpu_tiles: launch with the tiles that a GPU gets, also on the CPU.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "empty", _dirty(torch.empty)))
        if torch.device(device).type == "cpu":
            stack.enter_context(interpret(poison=True, races=True, order=order))
        if gpu_tiles:
            stack.enter_context(mock.patch.object(tiles, "device_class", return_value="gpu"))
        yield


def _dirty(empty: Any) -> Any:
    def dirty_empty(*args: Any, **kw: Any) -> Tensor:
        x: Tensor = empty(*args, **kw)
        if x.device.type != "meta":
            # every byte 0xFF: NaN in all float types, -1 in signed integers
            x.view(-1).view(torch.uint8).fill_(0xFF)
        return x

    return dirty_empty


def ulps(got: Tensor, want: Tensor) -> Tensor:
    """Steps along the type's number line between two bf16 or fp32 tensors; equal NaNs are 0 apart."""
    assert got.dtype == want.dtype
    integer = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[got.dtype]
    a, b = (x.contiguous().view(integer).long() for x in (got.cpu(), want.cpu()))
    low = -(2 ** (8 * got.element_size() - 1))
    a, b = (torch.where(x < 0, low - x, x) for x in (a, b))
    return torch.where(got.cpu().isnan() & want.cpu().isnan(), 0, (a - b).abs())
