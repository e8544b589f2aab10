"""Distances between two tensors, row by row. A number for a whole tensor would hide one bad row."""

from __future__ import annotations

import torch
from torch import Tensor

INFINITE = float("inf")


def row_error(got: Tensor, want: Tensor) -> Tensor:
    """Relative L2 error of each row.

        err[t] = |got[t] - want[t]|_2 / |want[t]|_2

    Shapes:    got and want [T, ...]. Returns [T] float64.
    Rounding:  float64 throughout.
    Special:   0 where both rows are zero; infinite where only `want` is zero, and where either row holds
               a value that is not finite: NaN is never equal to NaN, nor infinity to infinity.
    Errors:    ValueError on different shapes.
    """
    _check_shapes(got, want)
    a, b = got.double().flatten(1), want.double().flatten(1)
    apart, size = (a - b).norm(dim=1), b.norm(dim=1)
    error = torch.where(apart == 0, 0.0, apart / size)
    return torch.where(finite_rows(got) & finite_rows(want), error, INFINITE)


def row_ulps(got: Tensor, want: Tensor) -> Tensor:
    """Largest distance of any element of each row, counted along the type's own number line.

    Shapes:    got and want [T, ...], both bf16 or both fp32. Returns [T] int64; -1 where either row holds
               a value that is not finite.
    """
    _check_shapes(got, want)
    if got.dtype != want.dtype:
        raise ValueError(f"row_ulps: expected one dtype, got {got.dtype} and {want.dtype}")
    apart = (_ordinal(got) - _ordinal(want)).abs().flatten(1)
    most = apart.amax(dim=1) if apart.shape[1] else apart.new_zeros(len(apart))
    return torch.where(finite_rows(got) & finite_rows(want), most, -1)


def finite_rows(x: Tensor) -> Tensor:
    """[T] bool: rows of x [T, ...] whose every value is finite."""
    return torch.isfinite(x.float()).flatten(1).all(dim=1)


def least_error(want: Tensor, mantissa_bits: int) -> Tensor:
    """Relative L2 error of a row whose largest element alone is off by one ulp: what one rounding decided
    the other way costs.

    Shapes:  want [T, ...]; mantissa_bits of its stored type, 7 for bf16, 23 for fp32, 3 for e4m3. Returns [T]
             float64; 0 for a row of zeros.
    """
    rows = want.double().flatten(1)
    top = rows.abs().amax(dim=1)
    ulp = torch.exp2(torch.floor(torch.log2(top)) - mantissa_bits)
    size = rows.norm(dim=1)
    return torch.where((top > 0) & torch.isfinite(size), ulp / size, 0.0)


def kl_divergence(logits: Tensor, reference: Tensor) -> Tensor:
    """Kullback-Leibler divergence of each row's distribution from the reference's, in nats.

        KL[t] = sum_v p[v] (log p[v] - log q[v]),  p = softmax(reference[t]), q = softmax(logits[t])

    Shapes:  logits and reference [T, V]. Returns [T] float64, infinite where a row is not finite.
    """
    _check_shapes(logits, reference)
    q, p = logits.double().log_softmax(-1), reference.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp(min=0.0)
    return torch.where(finite_rows(logits) & finite_rows(reference), kl, INFINITE)


def _ordinal(x: Tensor) -> Tensor:
    """Place of each value on its type's number line; both zeros at 0."""
    bits, least = {torch.bfloat16: (torch.int16, -(2**15)), torch.float32: (torch.int32, -(2**31))}[x.dtype]
    code = x.contiguous().view(bits).long()
    return torch.where(code < 0, least - code, code)


def _check_shapes(got: Tensor, want: Tensor) -> None:
    if got.shape != want.shape:
        raise ValueError(f"measures: expected one shape, got {list(got.shape)} and {list(want.shape)}")
