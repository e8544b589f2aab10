"""The router: logits in parts, then choice and weights of each row's experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mono.fast.launch import launch
from mono.fast.ops.device import NO_KEY, key_index, rank_key, true_div
from mono.fast.tiles import fitted, tile


@triton.jit
def _router_logits_kernel(
    x_ptr,  # [T, H] bf16, rows x_stride elements apart
    router_ptr,  # [E, H] fp32, contiguous
    part_ptr,  # [parts, T, E] fp32, out: sums over one part of H each
    x_stride,
    T,
    H,
    E,
    STEPS: tl.constexpr,  # steps of BLOCK_K in a part
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of experts, one part of H and BLOCK_T rows to a program: W x^T in fp32 and not in tf32."""
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    part = tl.program_id(1).to(tl.int64)
    t = tl.program_id(2).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    w_row = router_ptr + e.to(tl.int64)[:, None] * H
    x_row = x_ptr + t[None, :] * x_stride

    sums = tl.zeros((BLOCK_E, BLOCK_T), dtype=tl.float32)
    for step in range(STEPS):
        k = (part * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        w = tl.load(w_row + k[None, :], mask=(e < E)[:, None] & (k < H)[None, :], other=0.0)
        x = tl.load(x_row + k[:, None], mask=(t < T)[None, :] & (k < H)[:, None], other=0.0)
        sums = tl.dot(w, x.to(tl.float32), sums, input_precision="ieee")

    out = (part * T + t)[None, :] * E + e[:, None]
    tl.store(part_ptr + out, sums, mask=(e < E)[:, None] & (t < T)[None, :])


@triton.jit
def _choose_kernel(
    part_ptr,  # [parts, T, E] fp32
    bias_ptr,  # [E] fp32
    live_ptr,  # [T] int64, negative in a padding row
    ids_ptr,  # [T, TOPK + SHARED] int32, out: best first, then the shared expert; -1 in a padding row
    weight_ptr,  # [T, TOPK + SHARED] fp32, out: 0 in a padding row
    slot_ptr,  # [E + SHARED, T] int32, out: the slot in which a row chose an expert, or -1
    T,
    E,
    parts,
    scaling,
    TOPK: tl.constexpr,
    SHARED: tl.constexpr,  # 1 if expert E is the shared one, which every row takes with weight 1
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two, at least E + 1
    BLOCK_P: tl.constexpr,  # power of two, at least `parts`
    BLOCK_S: tl.constexpr,  # power of two, at least TOPK + 1
):
    """BLOCK_T rows to a program; TOPK rounds of the best that is left."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    s = tl.arange(0, BLOCK_S)
    in_t = t < T
    live = tl.load(live_ptr + t, mask=in_t, other=-1) >= 0

    # [BLOCK_P, BLOCK_T, BLOCK_E]: the parts of H are added here, in one order
    p = tl.arange(0, BLOCK_P).to(tl.int64)
    at = (p[:, None, None] * T + t[None, :, None]) * E + e[None, None, :]
    inside = (p < parts)[:, None, None] & in_t[None, :, None] & (e < E)[None, None, :]
    logits = tl.sum(tl.load(part_ptr + at, mask=inside, other=0.0), axis=0)
    bias = tl.load(bias_ptr + e, mask=e < E, other=0.0)
    score = true_div(1.0, 1.0 + tl.exp(-logits))  # [BLOCK_T, BLOCK_E]
    key = tl.where((e < E)[None, :], rank_key(score + bias[None, :], e[None, :]), NO_KEY)

    ids = tl.full((BLOCK_T, BLOCK_S), -1, dtype=tl.int32)
    chosen = tl.zeros((BLOCK_T, BLOCK_S), dtype=tl.float32)
    slot_of = tl.full((BLOCK_T, BLOCK_E), -1, dtype=tl.int32)
    for slot in tl.static_range(TOPK):
        best = key_index(tl.max(key, axis=1))  # [BLOCK_T]
        hit = e[None, :] == best[:, None]
        key = tl.where(hit, NO_KEY, key)
        slot_of = tl.where(hit, slot, slot_of)
        ids = tl.where((s == slot)[None, :], best[:, None], ids)
        chosen = tl.where((s == slot)[None, :], tl.sum(tl.where(hit, score, 0.0), axis=1)[:, None], chosen)

    total = tl.maximum(tl.sum(chosen, axis=1), 1e-20, propagate_nan=tl.PropagateNan.ALL)
    weight = true_div(chosen, tl.broadcast_to(total[:, None], chosen.shape)) * scaling
    if SHARED:
        slot_of = tl.where((e == E)[None, :], TOPK, slot_of)
        ids = tl.where((s == TOPK)[None, :], E, ids)
        weight = tl.where((s == TOPK)[None, :], 1.0, weight)

    # a padding row is no expert's work
    out = t[:, None] * (TOPK + SHARED) + s
    in_row = in_t[:, None] & (s < TOPK + SHARED)[None, :]
    tl.store(ids_ptr + out, tl.where(live[:, None], ids, -1), mask=in_row)
    tl.store(weight_ptr + out, tl.where(live[:, None], weight, 0.0), mask=in_row)
    in_table = in_t[:, None] & (e < E + SHARED)[None, :]
    slot_of = tl.where(live[:, None], slot_of, -1)
    tl.store(slot_ptr + e.to(tl.int64)[None, :] * T + t[:, None], slot_of, mask=in_table)


def route(
    x: Tensor, router: Tensor, bias: Tensor, topk: int, scaling: float, slots: Tensor, shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Fast arm of `mono.reference.ops.router.route`, with the shared expert's slot and the padding rows.

    Shapes:    x [T, H] bf16, router [E, H] fp32, bias [E] fp32, slots [T] int64, negative in a padding row
               (a step's cache slots). Returns ids [T, K] int32, best first, weights [T, K] fp32, and slot_of
               [table, T] int32: in which slot a row chose an expert, or -1. With `shared`, K and the table
               are one longer: every row takes expert E last, with weight 1.
    Padding:   ids and slot_of -1, weights 0: such a row is no expert's work.
    Launch:    logits in parts of H, split so that enough programs run; then the parts are added and
               the experts chosen, BLOCK_T rows to a program. The parts follow from H alone.
    Agrees:    ids exactly where the ranked sums differ by more than the order of an fp32 sum can move them;
               weights within a few ulp of fp32.
    Errors:    ValueError, naming the argument, for another dtype, shape or layout.
    """
    (T, H), E = x.shape, router.shape[0]
    for name, tensor, dtype, shape in (
        ("router", router, torch.float32, (E, H)),
        ("bias", bias, torch.float32, (E,)),
        ("slots", slots, torch.int64, (T,)),
    ):
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"route: {name} is {tensor.dtype} {list(tensor.shape)}, "
                f"expected contiguous {dtype} {list(shape)}"
            )
    if x.dtype != torch.bfloat16 or x.stride(1) != 1:
        raise ValueError(f"route: x is {x.dtype} with stride {x.stride(1)} along H, expected bf16 with 1")
    if not 0 < topk <= E:
        raise ValueError(f"route: topk is {topk}, expected 1 to E = {E}")

    settings = fitted(tile("router_logits", x.device), BLOCK_E=E, BLOCK_K=H)
    parts = triton.cdiv(H, settings["BLOCK_K"] * settings["STEPS"])
    part = torch.empty((parts, T, E), dtype=torch.float32, device=x.device)
    launch(
        _router_logits_kernel,
        (triton.cdiv(E, settings["BLOCK_E"]), parts, triton.cdiv(T, settings["BLOCK_T"])),
        x.device,
        x,
        router,
        part,
        x.stride(0),
        T,
        H,
        E,
        **settings,
    )
    ids = torch.empty((T, topk + shared), dtype=torch.int32, device=x.device)
    weight = torch.empty((T, topk + shared), dtype=torch.float32, device=x.device)
    slot_of = torch.empty((E + shared, T), dtype=torch.int32, device=x.device)
    settings = dict(tile("choose", x.device))
    launch(
        _choose_kernel,
        (triton.cdiv(T, settings["BLOCK_T"]),),
        x.device,
        part,
        bias,
        slots,
        ids,
        weight,
        slot_of,
        T,
        E,
        parts,
        scaling,
        TOPK=topk,
        SHARED=int(shared),
        BLOCK_E=triton.next_power_of_2(E + 1),
        BLOCK_P=triton.next_power_of_2(parts),
        BLOCK_S=triton.next_power_of_2(topk + 1),
        **settings,
    )
    return ids, weight, slot_of
