"""Head norm, RoPE and cache insert of a packed qkv row, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mono.caches import LayerCache
from mono.fast.launch import launch
from mono.fast.limits import check_e4m3_cache
from mono.fast.ops.device import abs_max, e4m3_scale, quantise_e4m3, to_bf16, true_div
from mono.fast.tiles import Settings, tile
from mono.step import Step


@triton.jit
def _norm_rope_insert_kernel(
    qkv_ptr,  # [T, (N + 2 G) D + (J + 1) I] bf16: q, k, v, index q and index k heads, rows qkv_stride apart
    norms_ptr,  # [4, W] bf16: q, k, index q, index k
    rope_ptr,  # [positions, ROTARY] fp32, cos | sin
    positions_ptr,  # [T] int64
    slots_ptr,  # [T] int64
    q_ptr,  # [T, N, D] bf16
    index_q_ptr,  # [T, J, I] bf16
    k_ptr,  # [slots, G, D] e4m3
    v_ptr,  # [slots, G, D] e4m3
    k_scale_ptr,  # [slots, G] fp32
    v_scale_ptr,  # [slots, G] fp32
    index_k_ptr,  # [slots, I] e4m3
    qkv_stride,
    T,
    eps,
    N: tl.constexpr,
    G: tl.constexpr,
    J: tl.constexpr,  # index q heads, 0 where the layer does not select
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741  the letter of the shape
    ROTARY: tl.constexpr,
    W: tl.constexpr,  # max(D, I)
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """BLOCK_T rows x BLOCK_H heads a program; every head vector is summed by itself, in one order."""
    HALF: tl.constexpr = ROTARY // 2
    HEADS: tl.constexpr = N + 2 * G + J + (1 if J else 0)
    row = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None, None]
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :, None]
    d = tl.arange(0, W)[None, None, :]

    is_q = head < N
    is_k = (head >= N) & (head < N + G)
    is_v = (head >= N + G) & (head < N + 2 * G)
    is_index_q = (head >= N + 2 * G) & (head < N + 2 * G + J)
    is_index_k = (head >= N + 2 * G + J) & (head < HEADS)
    is_index = is_index_q | is_index_k
    width = tl.where(is_index, I, D)
    column = tl.where(is_index, (N + 2 * G) * D + (head - N - 2 * G) * I, head * D)
    live = (row < T) & (head < HEADS)
    inside = live & (d < width)

    x_row = qkv_ptr + row.to(tl.int64) * qkv_stride + column
    # dim d turns together with its partner, HALF dims away
    turned = d < ROTARY
    partner = tl.where(d < HALF, d + HALF, tl.where(turned, d - HALF, d))
    x = tl.load(x_row + d, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x_row + partner, mask=inside & turned, other=0.0).to(tl.float32)
    kind = tl.where(is_q, 0, tl.where(is_k, 1, tl.where(is_index_q, 2, 3)))
    weight = tl.load(norms_ptr + kind * W + d, mask=inside, other=0.0).to(tl.float32)
    other_weight = tl.load(norms_ptr + kind * W + partner, mask=inside & turned, other=0.0).to(tl.float32)
    position = tl.load(positions_ptr + row, mask=row < T, other=0)
    angle = rope_ptr + position * ROTARY + tl.where(d < HALF, d, d - HALF)
    cos = tl.load(angle, mask=(row < T) & turned, other=1.0)
    sin = tl.load(angle + HALF, mask=(row < T) & turned, other=0.0)

    # lanes past the head's width hold zero and add nothing, so the mean is over the width
    mean_square = tl.sum(x * x, axis=2, keep_dims=True) / width.to(tl.float32)
    inverse = tl.rsqrt(mean_square + eps)
    y = x * inverse * (1.0 + weight)
    z = other * inverse * (1.0 + other_weight)
    y = tl.where(turned, y * cos + tl.where(d < HALF, -z, z) * sin, y)
    y = to_bf16(tl.where(is_v, x, y))

    tl.store(q_ptr + (row.to(tl.int64) * N + head) * D + d, y, mask=inside & is_q)

    y = y.to(tl.float32)  # the cache quantises the bf16 value
    scale = e4m3_scale(abs_max(y, 2))[:, :, None]
    code = quantise_e4m3(true_div(y, tl.where(is_index, 1.0, scale)))
    slot = tl.load(slots_ptr + row, mask=row < T, other=-1)
    written = slot >= 0
    k_vector = slot * G + head - N
    v_vector = k_vector - G
    tl.store(k_ptr + k_vector * D + d, code, mask=inside & written & is_k)
    tl.store(v_ptr + v_vector * D + d, code, mask=inside & written & is_v)
    tl.store(k_scale_ptr + k_vector, scale, mask=live & written & is_k)
    tl.store(v_scale_ptr + v_vector, scale, mask=live & written & is_v)
    if J:
        tl.store(
            index_q_ptr + (row.to(tl.int64) * J + head - N - 2 * G) * I + d,
            to_bf16(y),  # exact: y was rounded above
            mask=inside & is_index_q,
        )
        index_vector = slot + head - (N + 2 * G + J)
        tl.store(index_k_ptr + index_vector * I + d, code, mask=inside & written & is_index_k)


def pack_norms(q_norm: Tensor, k_norm: Tensor, *index_norms: Tensor) -> Tensor:
    """[4, W] bf16: the weights of q, k, index q and index k heads, zero past their width; once, at build."""
    norms = [q_norm, k_norm, *index_norms]
    packed = q_norm.new_zeros((4, max(norm.shape[0] for norm in norms)))
    for row, norm in zip(packed, norms, strict=False):
        row[: norm.shape[0]] = norm
    return packed


def norm_rope_insert(
    qkv: Tensor,
    norms: Tensor,
    rope: Tensor,
    eps: float,
    step: Step,
    cache: LayerCache,
    heads: int,
    index_dim: int | None = None,
    settings: Settings | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Fast arm of `mono.reference.ops.attention.norm_rope` on every head of a packed row, and of
    `LayerCache.insert_kv` and `insert_index_k` on what comes out.

    Shapes:  qkv [T, (N + 2 G) D] bf16, and (G + 1) I more columns of index heads, which are read only if
             `index_dim` says that the layer selects; norms from `pack_norms`; rope [positions, rotary] fp32;
             N = `heads`. Returns q [T, N, D] bf16 and index q [T, G, I] bf16 or None.
    Writes:  K and V codes, their scales, and index K where the row's slot is not negative; nothing elsewhere.
    Launch:  rows x heads in tiles; a head vector's sums see no other vector.
    Agrees:  within 1 ulp of bf16 (the sum of squares has another order), or 2^-22 of the larger of a pair
             where the rotation cancels; dims past the rotary ones turn by nothing. V, codes and scales of
             equal bf16 values are exact.
    Errors:  ValueError, naming the tensor, on another type, shape or layout.
    """
    T, columns = qkv.shape
    G, D = cache.k.shape[2:]
    J, I = (G, index_dim) if index_dim is not None else (0, D)  # noqa: E741
    W = norms.shape[1]
    rotary = rope.shape[1]
    used = (heads + 2 * G) * D + (J + 1) * I * bool(J)
    if qkv.dtype != torch.bfloat16 or columns < used or qkv.stride(1) != 1 or step.rows != T:
        raise ValueError(
            f"norm_rope_insert: expected qkv bf16 [{step.rows}, at least {used}], rows whole, "
            f"got {qkv.dtype} {list(qkv.shape)} of strides {qkv.stride()}"
        )
    if rope.dtype != torch.float32 or not rope.is_contiguous() or rotary % 2 or rotary > min(D, I):
        raise ValueError(
            f"norm_rope_insert: expected rope fp32 [positions, even, at most {min(D, I)}], "
            f"got {rope.dtype} {list(rope.shape)}"
        )
    if max(D, I) != W or W & (W - 1) or not norms.is_contiguous():
        raise ValueError(
            f"norm_rope_insert: expected norms [4, {max(D, I)}], a power of two, got {list(norms.shape)}"
        )
    if J and cache.index_k is None:
        raise ValueError("norm_rope_insert: the layer selects, its cache has no index keys")
    check_e4m3_cache("norm_rope_insert", cache)
    q = torch.empty((T, heads, D), dtype=torch.bfloat16, device=qkv.device)
    index_q = torch.empty((T, J, I), dtype=torch.bfloat16, device=qkv.device) if J else None
    tiles = dict(tile("norm_rope", qkv.device) if settings is None else settings)
    vectors = heads + 2 * G + J + bool(J)
    block_h = tiles.setdefault("BLOCK_H", triton.next_power_of_2(vectors))
    grid = (triton.cdiv(T, tiles["BLOCK_T"]), triton.cdiv(vectors, block_h))
    launch(
        _norm_rope_insert_kernel,
        grid,
        qkv.device,
        qkv,
        norms,
        rope,
        step.positions,
        step.slots,
        q,
        q if index_q is None else index_q,
        cache.k,
        cache.v,
        cache.k_scale,
        cache.v_scale,
        cache.k if cache.index_k is None else cache.index_k,
        qkv.stride(0),
        T,
        eps,
        N=heads,
        G=G,
        J=J,
        D=D,
        I=I,
        ROTARY=rotary,
        W=W,
        **tiles,
    )
    return q, index_q
