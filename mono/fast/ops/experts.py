"""MXFP4 experts: gate and up with SwiGLU, down, and the weighted sum over a row's slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mono.fast.launch import launch
from mono.fast.ops.device import decode_mxfp4, round_mxfp8, swiglu_oai, to_bf16
from mono.fast.tiles import fitted, tile
from mono.formats import Mxfp4


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [T, H] bf16, rows x_stride elements apart
    packed_ptr,  # [table, 2 F, H/2] uint8, contiguous
    scale_ptr,  # [table, 2 F, H/32] uint8, contiguous
    slot_ptr,  # [table, T] int32: the slot in which a row chose an expert, or -1
    h_ptr,  # [T, slots, F] bf16, out: written where a row chose the expert
    x_stride,
    table,
    T,
    H,
    F,
    slots,
    alpha,
    beta,
    limit,
    ROUND: tl.constexpr,  # whether h is rounded to MXFP8 for the product that follows
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,  # a multiple of 32, so that it holds whole scale blocks of h
    BLOCK_K: tl.constexpr,
):
    """BLOCK_E experts, BLOCK_F columns of each, BLOCK_T rows: one product W x^T of their gate and up rows.

    Even and odd k are summed side by side, since a byte holds one of each; steps of BLOCK_K from the left.
    """
    e = tl.program_id(1).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    t = tl.program_id(2).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    chosen_ptr = slot_ptr + e[:, None] * T + t[None, :]
    slot = tl.load(chosen_ptr, mask=(e < table)[:, None] & (t < T)[None, :], other=-1)  # [BLOCK_E, BLOCK_T]
    wanted = tl.max(slot, axis=0) >= 0  # [BLOCK_T]
    if tl.max(wanted.to(tl.int32), axis=0) == 0:
        return  # no row of the tile chose these experts

    # rows of the product: gate of the first expert, its up, gate of the second, ...
    r = tl.arange(0, 2 * BLOCK_E * BLOCK_F)
    half = tl.program_id(1).to(tl.int64) * (2 * BLOCK_E) + r // BLOCK_F
    column = tl.program_id(0) * BLOCK_F + r % BLOCK_F
    in_w = ((half < 2 * table) & (column < F))[:, None]
    packed_row = packed_ptr + (half * F + column)[:, None] * (H // 2)
    scale_row = scale_ptr + (half * F + column)[:, None] * (H // 32)
    x_row = x_ptr + t[None, :] * x_stride

    sums = tl.zeros((2 * BLOCK_E * BLOCK_F, BLOCK_T), dtype=tl.float32)
    for start in range(0, H, BLOCK_K):
        byte = start // 2 + tl.arange(0, BLOCK_K // 2)
        block = start // 32 + tl.arange(0, BLOCK_K // 32)
        packed = tl.load(packed_row + byte[None, :], mask=in_w & (byte < H // 2)[None, :], other=0)
        scale = tl.load(scale_row + block[None, :], mask=in_w & (block < H // 32)[None, :], other=0)
        x_pair = x_row + 2 * byte[:, None]
        in_x = (byte < H // 2)[:, None] & wanted[None, :]
        x_even = tl.load(x_pair, mask=in_x, other=0.0)
        x_odd = tl.load(x_pair + 1, mask=in_x, other=0.0)
        w_even, w_odd = decode_mxfp4(packed, scale)
        sums = tl.dot(w_even, x_even, sums)
        sums = tl.dot(w_odd, x_odd, sums)

    # [BLOCK_E, BLOCK_F, BLOCK_T] each
    gate, up = tl.split(sums.reshape(BLOCK_E, 2, BLOCK_F, BLOCK_T).permute(0, 2, 3, 1))
    h = to_bf16(swiglu_oai(gate, up, alpha, beta, limit))
    if ROUND:
        blocks = h.to(tl.float32).reshape(BLOCK_E * BLOCK_F // 32, 32, BLOCK_T)
        h = round_mxfp8(blocks, 1).reshape(BLOCK_E, BLOCK_F, BLOCK_T)

    f = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    h_row = h_ptr + (t[None, :] * slots + slot) * F  # [BLOCK_E, BLOCK_T]
    in_h = (f < F)[None, :, None] & (slot >= 0)[:, None, :]
    tl.store(h_row[:, None, :] + f[None, :, None], h, mask=in_h)


@triton.jit
def _down_kernel(
    h_ptr,  # [T, slots, F] bf16, read where a row chose the expert
    packed_ptr,  # [table, H, F/2] uint8, contiguous
    scale_ptr,  # [table, H, F/32] uint8, contiguous
    slot_ptr,  # [table, T] int32: the slot in which a row chose an expert, or -1
    y_ptr,  # [T, slots, H] fp32, out: written where a row chose the expert
    table,
    T,
    H,
    F,
    slots,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_E experts, BLOCK_N outputs of each, BLOCK_T rows: one product W h^T, even and odd k side by side.

    Every expert reads other rows of h, so the columns of the product are (expert, row) pairs, and what is
    kept are the blocks in which the weights' expert is the column's: with BLOCK_E 1, all.
    """
    first = tl.program_id(1).to(tl.int64) * BLOCK_E
    c = tl.arange(0, BLOCK_E * BLOCK_T)
    c_expert = first + c // BLOCK_T
    t = tl.program_id(2).to(tl.int64) * BLOCK_T + c % BLOCK_T
    slot = tl.load(slot_ptr + c_expert * T + t, mask=(c_expert < table) & (t < T), other=-1)
    if tl.max(slot, axis=0) < 0:
        return  # no row of the tile chose these experts

    r = tl.arange(0, BLOCK_E * BLOCK_N)
    r_expert = first + r // BLOCK_N
    n = tl.program_id(0) * BLOCK_N + r % BLOCK_N
    in_w = ((r_expert < table) & (n < H))[:, None]
    packed_row = packed_ptr + (r_expert * H + n)[:, None] * (F // 2)
    scale_row = scale_ptr + (r_expert * H + n)[:, None] * (F // 32)
    pair = (t * slots + slot)[None, :]
    h_row = h_ptr + pair * F

    sums = tl.zeros((BLOCK_E * BLOCK_N, BLOCK_E * BLOCK_T), dtype=tl.float32)
    for start in range(0, F, BLOCK_K):
        byte = start // 2 + tl.arange(0, BLOCK_K // 2)
        block = start // 32 + tl.arange(0, BLOCK_K // 32)
        packed = tl.load(packed_row + byte[None, :], mask=in_w & (byte < F // 2)[None, :], other=0)
        scale = tl.load(scale_row + block[None, :], mask=in_w & (block < F // 32)[None, :], other=0)
        h_pair = h_row + 2 * byte[:, None]
        in_h = (byte < F // 2)[:, None] & (slot >= 0)[None, :]
        h_even = tl.load(h_pair, mask=in_h, other=0.0)
        h_odd = tl.load(h_pair + 1, mask=in_h, other=0.0)
        w_even, w_odd = decode_mxfp4(packed, scale)
        sums = tl.dot(w_even, h_even, sums)
        sums = tl.dot(w_odd, h_odd, sums)

    kept = in_w & (slot >= 0)[None, :] & (r_expert[:, None] == c_expert[None, :])
    tl.store(y_ptr + pair * H + n[:, None], sums, mask=kept)


@triton.jit
def _combine_kernel(
    y_ptr,  # [T, slots, H] fp32, read where an id is not negative
    ids_ptr,  # [T, slots] int32, -1 throughout a padding row
    weight_ptr,  # [T, slots] fp32
    out_ptr,  # [T, H] bf16, out
    T,
    H,
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """BLOCK_T rows and BLOCK_H columns to a program; the slots are added in their order."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)

    out = tl.zeros((BLOCK_T, BLOCK_H), dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = t * SLOTS + slot
        live = tl.load(ids_ptr + pair, mask=t < T, other=-1) >= 0
        weight = tl.load(weight_ptr + pair, mask=live, other=0.0)
        inside = live[:, None] & (h < H)[None, :]
        out += weight[:, None] * tl.load(y_ptr + pair[:, None] * H + h[None, :], mask=inside, other=0.0)

    tl.store(out_ptr + t[:, None] * H + h[None, :], to_bf16(out), mask=(t < T)[:, None] & (h < H)[None, :])


def gate_up(
    x: Tensor,
    matrix: Mxfp4,
    slot_of: Tensor,
    slots: int,
    alpha: float,
    beta: float,
    limit: float,
    mxfp8: bool,
) -> Tensor:
    """Gate and up of every chosen expert, and SwiGLU.

        h[t, slot_of[e, t]] = swiglu(W_e x[t])      where slot_of[e, t] is not negative

    Shapes:    x [T, H] bf16, matrix [table, 2 F, H] MXFP4, slot_of [table, T] int32. Returns [T, slots, F]
               bf16; what no expert was chosen for stays as it was allocated.
    Rounding:  exact products in bf16 operands, fp32 sums; SwiGLU to bf16, and to MXFP8 values if `mxfp8`.
    """
    (T, H), (table, F2, _) = x.shape, matrix.shape
    F = F2 // 2
    _check_matrix("gate_up", matrix, (table, F2, H))
    _check("slot_of", slot_of, torch.int32, (table, T))
    if x.dtype != torch.bfloat16 or x.stride(1) != 1:
        raise ValueError(f"experts: x is {x.dtype} with stride {x.stride(1)} along H, expected bf16 with 1")
    h = torch.empty((T, slots, F), dtype=torch.bfloat16, device=x.device)
    settings = fitted(tile("gate_up", x.device), BLOCK_F=F, BLOCK_K=H)
    launch(
        _gate_up_kernel,
        (
            triton.cdiv(F, settings["BLOCK_F"]),
            triton.cdiv(table, settings["BLOCK_E"]),
            triton.cdiv(T, settings["BLOCK_T"]),
        ),
        x.device,
        x,
        matrix.packed,
        matrix.scale,
        slot_of,
        h,
        x.stride(0),
        table,
        T,
        H,
        F,
        slots,
        alpha,
        beta,
        limit,
        ROUND=mxfp8,
        **settings,
    )
    return h


def down(h: Tensor, matrix: Mxfp4, slot_of: Tensor) -> Tensor:
    """The down product of every chosen expert.

        y[t, slot_of[e, t]] = W_e h[t, slot_of[e, t]]      where slot_of[e, t] is not negative

    Shapes:    h [T, slots, F] bf16, matrix [table, H, F] MXFP4, slot_of [table, T] int32. Returns
               [T, slots, H] fp32; what no expert was chosen for stays as it was allocated.
    Rounding:  exact products in bf16 operands, fp32 sums, none at the end.
    """
    (T, slots, F), (table, H, _) = h.shape, matrix.shape
    _check("h", h, torch.bfloat16, (T, slots, F))
    _check_matrix("down", matrix, (table, H, F))
    _check("slot_of", slot_of, torch.int32, (table, T))
    y = torch.empty((T, slots, H), dtype=torch.float32, device=h.device)
    settings = fitted(tile("down", h.device), BLOCK_N=H, BLOCK_K=F)
    launch(
        _down_kernel,
        (
            triton.cdiv(H, settings["BLOCK_N"]),
            triton.cdiv(table, settings["BLOCK_E"]),
            triton.cdiv(T, settings["BLOCK_T"]),
        ),
        h.device,
        h,
        matrix.packed,
        matrix.scale,
        slot_of,
        y,
        table,
        T,
        H,
        F,
        slots,
        **settings,
    )
    return y


def combine(y: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """The weighted sum of a row's slots.

        out[t] = sum_k weight[t, k] y[t, k]      over the slots whose id is not negative

    Shapes:    y [T, slots, H] fp32, ids [T, slots] int32, weight [T, slots] fp32. Returns [T, H] bf16.
    Rounding:  fp32 in slot order, then to bf16.
    """
    T, slots, H = y.shape
    _check("y", y, torch.float32, (T, slots, H))
    _check("ids", ids, torch.int32, (T, slots))
    _check("weight", weight, torch.float32, (T, slots))
    out = torch.empty((T, H), dtype=torch.bfloat16, device=y.device)
    settings = fitted(tile("combine", y.device), BLOCK_H=H)
    launch(
        _combine_kernel,
        (triton.cdiv(T, settings["BLOCK_T"]), triton.cdiv(H, settings["BLOCK_H"])),
        y.device,
        y,
        ids,
        weight,
        out,
        T,
        H,
        SLOTS=slots,
        **settings,
    )
    return out


def experts(
    x: Tensor,
    gate_up_matrix: Mxfp4,
    down_matrix: Mxfp4,
    ids: Tensor,
    slot_of: Tensor,
    weight: Tensor,
    alpha: float,
    beta: float,
    limit: float,
    mxfp8: bool,
) -> Tensor:
    """The weighted sum of each row's chosen experts.

        out[t] = sum_k weight[t, k] E_ids[t, k](x[t]),  E(x) = down swiglu(gate_up x)

    Shapes:    x [T, H] bf16, already rounded to MXFP8 values if `mxfp8`; gate_up [table, 2 F, H] and down
               [table, H, F] MXFP4; ids [T, slots] int32 and weight [T, slots] fp32; slot_of [table, T] int32
               (`route` makes the three). Returns [T, H] bf16, zero in a row whose ids are -1.
    Rounding:  both products exact in bf16 operands with fp32 sums; SwiGLU to bf16, and to MXFP8 values if
               `mxfp8`; each expert's output stays fp32; weighted and added in slot order in fp32; to bf16.
    Launch:    three kernels; a program to BLOCK_E experts (one, on a GPU), a tile of their outputs and
               BLOCK_T rows, which ends at once where no row chose them. No atomics: what a (row, slot)
               pair holds has one writer.
    Agrees:    only the order of the sums differs, and SwiGLU's exponential by a few ulp of fp32. A value
               next to a rounding boundary of h may round the other way.
    Errors:    ValueError, naming the argument, for another dtype, shape or layout.
    """
    h = gate_up(x, gate_up_matrix, slot_of, ids.shape[1], alpha, beta, limit, mxfp8)  # [T, slots, F]
    y = down(h, down_matrix, slot_of)  # [T, slots, H]
    return combine(y, ids, weight)


def _check_matrix(name: str, matrix: Mxfp4, shape: tuple[int, int, int]) -> None:
    table, rows, k = shape
    _check(f"{name}.packed", matrix.packed, torch.uint8, (table, rows, k // 2))
    _check(f"{name}.scale", matrix.scale, torch.uint8, (table, rows, k // 32))


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"experts: {name} is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}, "
            f"expected contiguous {dtype} {list(shape)}"
        )
