"""Linear layers over PTPC FP8 and bf16 matrices, and the row quantiser of PTPC FP8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mono.fast.launch import launch
from mono.fast.ops.device import quantise_row, to_bf16
from mono.fast.tiles import fitted, tile
from mono.formats import Bf16, PtpcFp8


@triton.jit
def _quantise_rows_kernel(
    x_ptr,  # [T, K] bf16, rows x_stride elements apart
    codes_ptr,  # [T, K] e4m3, out
    scale_ptr,  # [T] fp32, out
    x_stride,
    T,
    K,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two, at least K
):
    """BLOCK_T whole rows to a program; a maximum has no order."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    inside = (row < T)[:, None] & (k < K)[None, :]

    x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
    codes, scale = quantise_row(x)

    tl.store(codes_ptr + row[:, None] * K + k[None, :], codes, mask=inside)
    tl.store(scale_ptr + row, scale, mask=row < T)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Fast arm of `mono.formats.ptpc_fp8.quantise_rows` for bf16 rows.

    Shapes:    x [T, K] bf16. Returns codes [T, K] e4m3 and scale [T] fp32.
    Launch:    whole rows, BLOCK_T of them to a program.
    Agrees:    exactly, NaN and infinity included: a maximum has no order, and both divisions are true ones.
    Errors:    ValueError for another dtype or shape, or columns that are not adjacent.
    """
    if x.dtype != torch.bfloat16 or x.dim() != 2:
        raise ValueError(f"quantise_rows: x is {x.dtype} {list(x.shape)}, expected bf16 [T, K]")
    if x.stride(1) != 1:
        raise ValueError(f"quantise_rows: x has stride {x.stride(1)} along K, the kernel reads 1")
    T, K = x.shape
    codes = torch.empty((T, K), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(T, dtype=torch.float32, device=x.device)
    settings = tile("quantise_rows", x.device)
    launch(
        _quantise_rows_kernel,
        (triton.cdiv(T, settings["BLOCK_T"]),),
        x.device,
        x,
        codes,
        scale,
        x.stride(0),
        T,
        K,
        BLOCK_K=triton.next_power_of_2(K),
        **settings,
    )
    return codes, scale


@triton.jit
def _ptpc_linear_kernel(
    x_ptr,  # [T, K] e4m3
    x_scale_ptr,  # [T] fp32
    w_ptr,  # [N, K] e4m3, rows w_stride elements apart
    w_scale_ptr,  # [N] fp32, w_scale_stride elements apart
    y_ptr,  # [T, N] bf16, out
    x_stride,
    w_stride,
    w_scale_stride,
    T,
    N,
    K,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y^T = W x^T: a tile of W's rows and of tokens to a program, K summed in steps of BLOCK_K from the left.

    Weights are the matrix unit's M operand, because there are more of them than its smallest M. Codes are
    widened to fp16, which holds every e4m3 value: products are exact and sums fp32, where FP8 units keep
    fewer bits.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    w_row = w_ptr + n[:, None] * w_stride
    x_row = x_ptr + t[None, :] * x_stride

    sums = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + k
        w = tl.load(w_row + at[None, :], mask=(n < N)[:, None] & (at < K)[None, :], other=0.0)
        x = tl.load(x_row + at[:, None], mask=(t < T)[None, :] & (at < K)[:, None], other=0.0)
        sums = tl.dot(w.to(tl.float16), x.to(tl.float16), sums)

    x_scale = tl.load(x_scale_ptr + t, mask=t < T, other=0.0)
    w_scale = tl.load(w_scale_ptr + n * w_scale_stride, mask=n < N, other=0.0)
    y = sums * x_scale[None, :] * w_scale[:, None]

    tl.store(y_ptr + t[None, :] * N + n[:, None], to_bf16(y), mask=(n < N)[:, None] & (t < T)[None, :])


def ptpc_linear(x8: Tensor, scale: Tensor, matrix: PtpcFp8) -> Tensor:
    """Fast arm of `mono.reference.ops.linear.linear` for PTPC FP8, its result rounded to bf16.

    Shapes:    x8 [T, K] e4m3, scale [T] fp32, matrix [N, K]. Returns [T, N] bf16.
    Rounding:  exact products, fp32 sums, times the row's scale, then the channel's, then to bf16.
    Launch:    a program to BLOCK_N outputs of BLOCK_T tokens; tiles follow from N and K alone, so a row's
               sums have one order whatever else is in the step.
    Agrees:    within 1 ulp of bf16 of a sum that does not cancel: only the order of the sum differs.
    Errors:    ValueError, naming the argument, for another dtype or shape, or columns that are not adjacent.
    """
    N, K = matrix.shape
    if x8.dtype != torch.float8_e4m3fn or x8.dim() != 2 or x8.shape[1] != K:
        raise ValueError(f"ptpc_linear: x8 is {x8.dtype} {list(x8.shape)}, expected float8_e4m3fn [T, {K}]")
    T = x8.shape[0]
    if scale.dtype != torch.float32 or scale.shape != (T,) or not scale.is_contiguous():
        raise ValueError(
            f"ptpc_linear: scale is {scale.dtype} {list(scale.shape)}, expected contiguous fp32 [{T}]"
        )
    for name, x in (("x8", x8), ("matrix", matrix.values)):
        if x.stride(1) != 1:
            raise ValueError(f"ptpc_linear: {name} has stride {x.stride(1)} along K, the kernel reads 1")
    y = torch.empty((T, N), dtype=torch.bfloat16, device=x8.device)
    settings = fitted(tile("ptpc_linear", x8.device), BLOCK_N=N, BLOCK_K=K)
    launch(
        _ptpc_linear_kernel,
        (triton.cdiv(N, settings["BLOCK_N"]), triton.cdiv(T, settings["BLOCK_T"])),
        x8.device,
        x8,
        scale,
        matrix.values,
        matrix.scale,
        y,
        x8.stride(0),
        matrix.values.stride(0),
        matrix.scale.stride(0),
        T,
        N,
        K,
        **settings,
    )
    return y


@triton.jit
def _bf16_linear_kernel(
    x_ptr,  # [T, K] bf16, rows x_stride elements apart
    w_ptr,  # [N, K] bf16, rows w_stride elements apart
    y_ptr,  # [T, N] fp32, out
    x_stride,
    w_stride,
    T,
    N,
    K,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y^T = W x^T, as in the PTPC kernel."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    w_row = w_ptr + n[:, None] * w_stride
    x_row = x_ptr + t[None, :] * x_stride

    sums = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + k
        w = tl.load(w_row + at[None, :], mask=(n < N)[:, None] & (at < K)[None, :], other=0.0)
        x = tl.load(x_row + at[:, None], mask=(t < T)[None, :] & (at < K)[:, None], other=0.0)
        sums = tl.dot(w, x, sums)

    tl.store(y_ptr + t[None, :] * N + n[:, None], sums, mask=(n < N)[:, None] & (t < T)[None, :])


def bf16_linear(x: Tensor, matrix: Bf16) -> Tensor:
    """Fast arm of `mono.reference.ops.linear.linear` for a bf16 matrix.

    Shapes:    x [T, K] bf16, matrix [N, K]. Returns [T, N] fp32, not rounded.
    Rounding:  exact products, fp32 sums.
    Launch:    a program to BLOCK_N outputs of BLOCK_T tokens.
    Agrees:    only the order of the sum differs.
    Errors:    ValueError, naming the argument, for another dtype or shape, or columns that are not adjacent.
    """
    N, K = matrix.shape
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != K:
        raise ValueError(f"bf16_linear: x is {x.dtype} {list(x.shape)}, expected bf16 [T, {K}]")
    for name, tensor in (("x", x), ("matrix", matrix.values)):
        if tensor.stride(1) != 1:
            raise ValueError(f"bf16_linear: {name} has stride {tensor.stride(1)} along K, the kernel reads 1")
    T = x.shape[0]
    y = torch.empty((T, N), dtype=torch.float32, device=x.device)
    settings = fitted(tile("bf16_linear", x.device), BLOCK_N=N, BLOCK_K=K)
    launch(
        _bf16_linear_kernel,
        (triton.cdiv(N, settings["BLOCK_N"]), triton.cdiv(T, settings["BLOCK_T"])),
        x.device,
        x,
        matrix.values,
        y,
        x.stride(0),
        matrix.values.stride(0),
        T,
        N,
        K,
        **settings,
    )
    return y
