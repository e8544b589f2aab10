"""Absorb the last slot's output and normalise, in one pass over the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mono.fast.launch import launch
from mono.fast.ops.device import quantise_row, round_mxfp8, to_bf16
from mono.fast.tiles import tile


@triton.jit
def _absorb_norm_kernel(
    residual_ptr,  # [T, H] bf16, rows residual_stride elements apart
    partial_ptr,  # [T, H] bf16, rows partial_stride elements apart; not read unless HAS_PARTIAL
    weight_ptr,  # [H] bf16
    total_ptr,  # [T, H] bf16, out: the sum, rounded once
    x_ptr,  # [T, H], out: the norm of the unrounded sum, e4m3 codes for PTPC, else bf16
    scale_ptr,  # [T] fp32, out: scale of each row's codes; written for PTPC alone
    rounded_ptr,  # [T, H] bf16, out: x rounded to MXFP8 values; written for MXFP8 alone
    residual_stride,
    partial_stride,
    T,
    H,
    eps,
    HAS_PARTIAL: tl.constexpr,
    PTPC: tl.constexpr,
    MXFP8: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,  # power of two, at least H and 32
):
    """BLOCK_T whole rows to a program, so a row's sum has one order whatever else is in the step."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.arange(0, BLOCK_H)
    inside = (row < T)[:, None] & (h < H)[None, :]

    total = tl.load(residual_ptr + row[:, None] * residual_stride + h[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    if HAS_PARTIAL:
        partial = tl.load(partial_ptr + row[:, None] * partial_stride + h[None, :], mask=inside, other=0.0)
        total += partial.to(tl.float32)
    weight = tl.load(weight_ptr + h, mask=h < H, other=0.0).to(tl.float32)

    # lanes outside hold zero and add nothing, so the mean is over H and not over BLOCK_H
    mean_square = tl.sum(total * total, axis=1) / H
    x = total * tl.rsqrt(mean_square + eps)[:, None] * (1.0 + weight)[None, :]

    out = row[:, None] * H + h[None, :]
    tl.store(total_ptr + out, to_bf16(total), mask=inside)
    if PTPC:
        codes, scale = quantise_row(x)
        tl.store(x_ptr + out, codes, mask=inside)
        tl.store(scale_ptr + row, scale, mask=row < T)
    else:
        tl.store(x_ptr + out, to_bf16(x), mask=inside)
    if MXFP8:
        blocks = to_bf16(x).to(tl.float32).reshape(BLOCK_T, BLOCK_H // 32, 32)
        tl.store(rounded_ptr + out, round_mxfp8(blocks, 2).reshape(BLOCK_T, BLOCK_H), mask=inside)


def absorb_norm_ptpc(
    residual: Tensor, partial: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Fast arm of `absorb`, `gemma_rms_norm` and the PTPC row quantiser of the product that follows.

    Shapes:    residual and partial [T, H] bf16, weight [H] bf16. Returns the new residual [T, H] bf16, codes
               [T, H] e4m3 and their scale [T] fp32.
    Rounding:  the residual once, from the fp32 sum; the codes straight from the fp32 norm of that sum.
    Launch:    whole rows, BLOCK_T of them to a program; BLOCK_H follows from H alone.
    Agrees:    the residual exactly; the norm within a few ulp of fp32, since the order of the sum of squares
               and the hardware's rsqrt differ. So a scale is that near, and a code next to a rounding
               boundary of e4m3 may step by one.
    Errors:    ValueError, naming the argument, for another dtype or shape, or columns that are not adjacent.
    """
    T, H = _check(residual, partial, weight)
    codes = torch.empty((T, H), dtype=torch.float8_e4m3fn, device=residual.device)
    scale = torch.empty(T, dtype=torch.float32, device=residual.device)
    return _absorb_norm(residual, partial, weight, eps, codes, scale, None), codes, scale


def absorb_norm_bf16(
    residual: Tensor, partial: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As `absorb_norm_ptpc`, with the norm rounded to bf16 instead of quantised.

    Shapes:    returns the new residual [T, H] bf16 and the norm [T, H] bf16.
    Agrees:    the residual exactly; the norm within 1 ulp of bf16.
    """
    T, H = _check(residual, partial, weight)
    x = torch.empty((T, H), dtype=torch.bfloat16, device=residual.device)
    return _absorb_norm(residual, partial, weight, eps, x, None, None), x


def absorb_norm_mxfp8(
    residual: Tensor, partial: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `absorb_norm_bf16`, with a second copy of the norm rounded to the values of its MXFP8 form.

    Shapes:    returns the new residual, the norm, and the rounded norm, each [T, H] bf16.
    Rounding:  the rounded norm from the bf16 norm, by `mono.formats.mxfp8.quantise`; bf16 holds it exactly.
    Agrees:    the rounded norm exactly, given the norm.
    Errors:    as `absorb_norm_ptpc`; also ValueError if H is no multiple of 32.
    """
    T, H = _check(residual, partial, weight)
    if H % 32:
        raise ValueError(f"absorb_norm: H is {H}, expected a multiple of the scale block, 32")
    x = torch.empty((T, H), dtype=torch.bfloat16, device=residual.device)
    rounded = torch.empty_like(x)
    return _absorb_norm(residual, partial, weight, eps, x, None, rounded), x, rounded


def _absorb_norm(
    residual: Tensor,
    partial: Tensor | None,
    weight: Tensor,
    eps: float,
    x: Tensor,
    scale: Tensor | None,
    rounded: Tensor | None,
) -> Tensor:
    T, H = residual.shape
    total = torch.empty((T, H), dtype=torch.bfloat16, device=residual.device)
    settings = dict(tile("absorb_norm", residual.device))
    launch(
        _absorb_norm_kernel,
        (triton.cdiv(T, settings["BLOCK_T"]),),
        residual.device,
        residual,
        partial,
        weight,
        total,
        x,
        scale,
        rounded,
        residual.stride(0),
        0 if partial is None else partial.stride(0),
        T,
        H,
        eps,
        HAS_PARTIAL=partial is not None,
        PTPC=scale is not None,
        MXFP8=rounded is not None,
        BLOCK_H=max(32, triton.next_power_of_2(H)),
        **settings,
    )
    return total


def _check(residual: Tensor, partial: Tensor | None, weight: Tensor) -> torch.Size:
    for name, x, shape in (
        ("residual", residual, residual.shape),
        ("partial", partial, residual.shape),
        ("weight", weight, residual.shape[-1:]),
    ):
        if x is None:
            continue
        if x.dtype != torch.bfloat16 or x.shape != shape:
            raise ValueError(f"absorb_norm: {name} is {x.dtype} {list(x.shape)}, expected bf16 {list(shape)}")
        if x.stride(-1) != 1:
            raise ValueError(f"absorb_norm: {name} has stride {x.stride(-1)} along H, the kernel reads 1")
    if residual.dim() != 2:
        raise ValueError(f"absorb_norm: residual has shape {list(residual.shape)}, expected [T, H]")
    return residual.shape
