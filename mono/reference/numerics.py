"""How the reference sums: as it comes, in float64, or in another legal order.

Where values are rounded, and to what, is the model; the order inside one sum is not. So the three
settings share every rounding point and every elementwise operation (fp32), and differ in sums alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ROW_TILE = 16


@dataclass(frozen=True, slots=True)
class Numerics:
    """matmul(a [..., M, K], b [..., N, K]) -> [..., M, N] fp32, a @ b^T; sum(x, dim) -> fp32."""

    name: str
    matmul: Callable[[Tensor, Tensor], Tensor]
    sum: Callable[[Tensor, int], Tensor]


def _native_matmul(a: Tensor, b: Tensor) -> Tensor:
    # few rows are padded to one tile, so that a row's sum has one order whatever else is in the step
    rows = a.shape[-2]
    if rows < ROW_TILE:
        a = torch.nn.functional.pad(a, (0, 0, 0, ROW_TILE - rows))
    return (a.float() @ b.float().mT)[..., :rows, :]


def _native_sum(x: Tensor, dim: int) -> Tensor:
    return x.float().sum(dim)


def _float64_matmul(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() @ b.double().mT).float()


def _float64_sum(x: Tensor, dim: int) -> Tensor:
    return x.double().sum(dim).float()


def reordered(chunks: int) -> Numerics:
    """Sums in `chunks` interleaved parts, each summed alone, then added last to first, all fp32."""
    if chunks < 2:
        raise ValueError(f"reordered: expected at least 2 chunks, got {chunks}")

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        parts = [_native_matmul(a[..., c::chunks], b[..., c::chunks]) for c in range(chunks)]
        return _add_backwards(parts)

    def sum_(x: Tensor, dim: int) -> Tensor:
        at = torch.arange(x.shape[dim], device=x.device)
        return _add_backwards([x.float().index_select(dim, at[c::chunks]).sum(dim) for c in range(chunks)])

    return Numerics(f"reordered/{chunks}", matmul, sum_)


def _add_backwards(parts: list[Tensor]) -> Tensor:
    total = parts[-1]
    for part in reversed(parts[:-1]):
        total = total + part
    return total


NATIVE = Numerics("native", _native_matmul, _native_sum)
FLOAT64 = Numerics("float64", _float64_matmul, _float64_sum)
