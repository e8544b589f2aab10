"""SwiGLU-OAI straight into the row quantiser of the product that follows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mono.fast.launch import launch
from mono.fast.ops.device import quantise_row, swiglu_oai, to_bf16
from mono.fast.tiles import tile


@triton.jit
def _swiglu_ptpc_kernel(
    gate_up_ptr,  # [T, 2 F] bf16, gate columns then up columns, rows gate_up_stride elements apart
    codes_ptr,  # [T, F] e4m3, out
    scale_ptr,  # [T] fp32, out
    gate_up_stride,
    T,
    F,
    alpha,
    beta,
    limit,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,  # power of two, at least F
):
    """BLOCK_T whole rows to a program."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    f = tl.arange(0, BLOCK_F)
    inside = (row < T)[:, None] & (f < F)[None, :]
    gate_row = gate_up_ptr + row[:, None] * gate_up_stride

    gate = tl.load(gate_row + f[None, :], mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_row + F + f[None, :], mask=inside, other=0.0).to(tl.float32)

    # lanes outside hold a zero gate, so zero, and do not move the row's amax
    act = to_bf16(swiglu_oai(gate, up, alpha, beta, limit))
    codes, scale = quantise_row(act.to(tl.float32))

    tl.store(codes_ptr + row[:, None] * F + f[None, :], codes, mask=inside)
    tl.store(scale_ptr + row, scale, mask=row < T)


def swiglu_ptpc(gate_up: Tensor, alpha: float, beta: float, limit: float) -> tuple[Tensor, Tensor]:
    """Fast arm of `mono.reference.ops.swiglu.swiglu_oai`, rounded to bf16 and then quantised by row.

    Shapes:    gate_up [T, 2 F] bf16. Returns codes [T, F] e4m3 and scale [T] fp32.
    Rounding:  SwiGLU in fp32 to bf16, as the model does; then PTPC's row quantiser.
    Launch:    whole rows, BLOCK_T of them to a program.
    Agrees:    but for values next to a rounding boundary of bf16, since the hardware's exponential is a few
               ulp of fp32 from exact.
    Errors:    ValueError for another dtype or shape, or columns that are not adjacent.
    """
    if gate_up.dtype != torch.bfloat16 or gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(
            f"swiglu_ptpc: gate_up is {gate_up.dtype} {list(gate_up.shape)}, expected bf16 [T, 2 F]"
        )
    if gate_up.stride(1) != 1:
        raise ValueError(f"swiglu_ptpc: gate_up has stride {gate_up.stride(1)} along F, the kernel reads 1")
    T, F = gate_up.shape[0], gate_up.shape[1] // 2
    codes = torch.empty((T, F), dtype=torch.float8_e4m3fn, device=gate_up.device)
    scale = torch.empty(T, dtype=torch.float32, device=gate_up.device)
    settings = tile("swiglu_ptpc", gate_up.device)
    launch(
        _swiglu_ptpc_kernel,
        (triton.cdiv(T, settings["BLOCK_T"]),),
        gate_up.device,
        gate_up,
        codes,
        scale,
        gate_up.stride(0),
        T,
        F,
        alpha,
        beta,
        limit,
        BLOCK_F=triton.next_power_of_2(F),
        **settings,
    )
    return codes, scale
