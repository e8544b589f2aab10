"""Softmax attention over the paged FP8 cache, the keys cut into splits that a second launch merges."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mono.caches import LayerCache
from mono.fast.launch import launch
from mono.fast.limits import check_e4m3_cache
from mono.fast.ops.device import to_bf16
from mono.fast.tiles import Settings, tile
from mono.step import Step


@triton.jit
def _dot(a, b, c):
    """a [P, m, k] x b [P, k, n] + c [P, m, n], fp32; a single pair is multiplied in two dimensions."""
    if a.shape[0] == 1:
        flat = tl.dot(
            tl.reshape(a, (a.shape[1], a.shape[2])),
            tl.reshape(b, (b.shape[1], b.shape[2])),
            tl.reshape(c, (c.shape[1], c.shape[2])),
        )
        product = tl.reshape(flat, (1, a.shape[1], b.shape[2]))
    else:
        product = tl.dot(a, b, c)
    return product


@triton.jit
def _absorb_keys(
    top,  # [P, C] fp32, largest z so far
    total,  # [P, C] fp32, sum of exp(z - top) so far
    out,  # [P, C, D] fp32, sum of exp(z - top) v so far
    q,  # [P, C, D] bf16
    slot,  # [P, KEYS] int64
    head,  # [P] KV head
    live,  # [P, KEYS], keys that some query of the pair reads
    sees,  # [P, C or 1, KEYS]
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    softmax_scale,
    G: tl.constexpr,
    D: tl.constexpr,
):
    """One tile of keys into the running softmax. A tile without a key changes no bit of it."""
    vector = slot * G + head[:, None]
    at = vector[:, :, None] * D + tl.arange(0, D)[None, None, :]
    # dead slots are masked where they are loaded, since their NaN times zero would be NaN
    k = tl.load(k_ptr + at, mask=live[:, :, None], other=0.0).to(tl.bfloat16)
    k_scale = tl.load(k_scale_ptr + vector, mask=live, other=0.0)
    v = tl.load(v_ptr + at, mask=live[:, :, None], other=0.0).to(tl.bfloat16)
    v_scale = tl.load(v_scale_ptr + vector, mask=live, other=0.0)

    none = tl.zeros((q.shape[0], q.shape[1], k.shape[1]), dtype=tl.float32)
    z = _dot(q, tl.permute(k, (0, 2, 1)), none) * k_scale[:, None, :] * softmax_scale  # [P, C, KEYS]
    z = tl.where(sees, z, float("-inf"))
    new_top = tl.maximum(top, tl.max(z, axis=2))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp(z - base[:, :, None])
    kept = tl.exp(top - base)
    total = total * kept + tl.sum(p, axis=2)
    # fp32 weights as three bf16 parts of 8 bits each, so that the product keeps all 24 of theirs
    out = out * kept[:, :, None]
    rest = p * v_scale[:, None, :]
    for _ in tl.static_range(3):
        part = to_bf16(rest)
        out = _dot(part, v, out)
        rest = rest - part.to(tl.float32)
    return new_top, total, out


@triton.jit
def _attend_selected_kernel(
    q_ptr,  # [T, N, D] bf16
    k_ptr,  # [slots, G, D] e4m3
    v_ptr,  # [slots, G, D] e4m3
    k_scale_ptr,  # [slots, G] fp32
    v_scale_ptr,  # [slots, G] fp32
    tables_ptr,  # [B, M] int32
    visible_ptr,  # [T] int32
    selected_ptr,  # [T, G, S] int32
    out_ptr,  # [T, N, SPLITS, D] fp32
    top_ptr,  # [T, N, SPLITS] fp32
    total_ptr,  # [T, N, SPLITS] fp32
    softmax_scale,
    pairs,  # T G
    M,
    Q,
    G: tl.constexpr,
    S: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a KV block
    SPLITS: tl.constexpr,
    SHARE: tl.constexpr,  # picked blocks of a split, a power of two
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """BLOCK_P pairs of a row and a KV head, SHARE of their picked blocks as one tile of keys."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    split = tl.program_id(1)
    row = pair // G
    head = pair % G
    c = tl.arange(0, BLOCK_C)
    key = tl.arange(0, SHARE * BLOCK)
    d = tl.arange(0, D)

    inside = pair < pairs
    entry = split * SHARE + key // BLOCK
    named = inside[:, None] & (entry < S)[None, :]
    block = tl.load(selected_ptr + pair[:, None] * S + entry[None, :], mask=named, other=-1)
    visible = tl.load(visible_ptr + row, mask=inside, other=0)
    live = (block >= 0) & (block * BLOCK + (key % BLOCK)[None, :] < visible[:, None])
    page = tl.load(tables_ptr + (row // Q)[:, None] * M + block, mask=live, other=0).to(tl.int64)
    slot = page * BLOCK + (key % BLOCK)[None, :]

    vector = (row * (G * GROUP) + head * GROUP)[:, None] + c[None, :]  # of q and of the output
    held = inside[:, None] & (c < GROUP)[None, :]
    at = vector[:, :, None] * D + d[None, None, :]
    q = tl.load(q_ptr + at, mask=held[:, :, None], other=0.0)

    top = tl.full((BLOCK_P, BLOCK_C), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    out = tl.zeros((BLOCK_P, BLOCK_C, D), tl.float32)
    top, total, out = _absorb_keys(
        top, total, out, q, slot, head, live, live[:, None, :],
        k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, softmax_scale, G, D,
    )  # fmt: skip

    part = vector * SPLITS + split
    tl.store(out_ptr + part[:, :, None] * D + d[None, None, :], out, mask=held[:, :, None])
    tl.store(top_ptr + part, top, mask=held)
    tl.store(total_ptr + part, total, mask=held)


@triton.jit
def _attend_kernel(
    q_ptr,  # [T, N, D] bf16
    k_ptr,  # [slots, G, D] e4m3
    v_ptr,  # [slots, G, D] e4m3
    k_scale_ptr,  # [slots, G] fp32
    v_scale_ptr,  # [slots, G] fp32
    tables_ptr,  # [B, M] int32
    visible_ptr,  # [T] int32
    out_ptr,  # [T, N, SPLITS, D] fp32
    top_ptr,  # [T, N, SPLITS] fp32
    total_ptr,  # [T, N, SPLITS] fp32
    softmax_scale,
    pairs,  # B G
    M,
    Q,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a KV block
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """BLOCK_P pairs of a request and a KV head, BLOCK_C queries of each, every SPLITS-th tile of KEYS.

    Tiles are dealt out by their position alone, so a row's sums have one order, however long its neighbours.
    """
    pair = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    split = tl.program_id(2)
    request = pair // G
    head = pair % G
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    d = tl.arange(0, D)

    held = (pair < pairs)[:, None] & (column < Q * GROUP)[None, :]
    row = request[:, None] * Q + (column // GROUP)[None, :]
    visible = tl.load(visible_ptr + row, mask=held, other=0)  # [P, C]
    most = tl.max(visible, axis=1)
    vector = row * (G * GROUP) + head[:, None] * GROUP + (column % GROUP)[None, :]
    q = tl.load(q_ptr + vector[:, :, None] * D + d[None, None, :], mask=held[:, :, None], other=0.0)

    top = tl.full((BLOCK_P, BLOCK_C), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    out = tl.zeros((BLOCK_P, BLOCK_C, D), tl.float32)
    for start in range(split * KEYS, tl.max(most, axis=0), SPLITS * KEYS):
        key = start + tl.arange(0, KEYS)
        live = key[None, :] < most[:, None]
        page = tl.load(tables_ptr + request[:, None] * M + (key // BLOCK)[None, :], mask=live, other=0)
        slot = page.to(tl.int64) * BLOCK + (key % BLOCK)[None, :]
        sees = key[None, None, :] < visible[:, :, None]
        top, total, out = _absorb_keys(
            top, total, out, q, slot, head, live, sees,
            k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, softmax_scale, G, D,
        )  # fmt: skip

    part = vector * SPLITS + split
    tl.store(out_ptr + part[:, :, None] * D + d[None, None, :], out, mask=held[:, :, None])
    tl.store(top_ptr + part, top, mask=held)
    tl.store(total_ptr + part, total, mask=held)


@triton.jit
def _merge_splits_kernel(
    out_ptr,  # [R, SPLITS, D] fp32
    top_ptr,  # [R, SPLITS] fp32
    total_ptr,  # [R, SPLITS] fp32
    y_ptr,  # [R, D] bf16
    R,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,  # power of two, at least SPLITS
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """BLOCK_R query vectors a program. A split without a key weighs exp(-inf) = 0 and holds zeros."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, D)
    part = r[:, None] * SPLITS + s[None, :]
    inside = (r < R)[:, None] & (s < SPLITS)[None, :]

    top = tl.load(top_ptr + part, mask=inside, other=float("-inf"))
    total = tl.load(total_ptr + part, mask=inside, other=0.0)
    out = tl.load(out_ptr + part[:, :, None] * D + d[None, None, :], mask=inside[:, :, None], other=0.0)

    top_of_all = tl.max(top, axis=1)
    base = tl.where(top_of_all == float("-inf"), 0.0, top_of_all)
    weight = tl.exp(top - base[:, None])
    total = tl.sum(weight * total, axis=1)
    y = tl.sum(weight[:, :, None] * out, axis=1) / tl.where(total == 0.0, 1.0, total)[:, None]

    tl.store(y_ptr + r[:, None] * D + d[None, :], to_bf16(y), mask=(r < R)[:, None])


def attend_selected(
    q: Tensor, cache: LayerCache, step: Step, selected: Tensor, settings: Settings | None = None
) -> Tensor:
    """Fast arm of `mono.reference.ops.attention.attend_selected`.

    Shapes:    q [T, N, D] bf16, selected [T, G, S] int32, -1 where there is none. Returns [T, N, D] bf16.
    Launch:    pairs of a row and a KV head x splits of its S places, the group's query heads (padded to 16)
               as one side of the products; then a merge of the splits. A row's selection alone says which
               block falls into which split, so its bits do not depend on other rows.
    Rounding:  as the reference: bf16 q times widened codes, exact products, fp32 sums, softmax in fp32. The
               fp32 weights p v_scale enter the second product as the sum of two bf16 numbers, not as one:
               some 16 bits of each are kept.
    Agrees:    within 1 ulp of bf16 and 2^-14 sum_t p |v| / sum_t p, for fp32 sums and exponentials.
    Errors:    ValueError, naming the tensor, on another type, shape or layout.
    """
    T, N, D, G = _check(q, cache, step, "attend_selected")
    if selected.dtype != torch.int32 or selected.shape[:2] != (T, G) or not selected.is_contiguous():
        raise ValueError(
            f"attend_selected: expected contiguous int32 selected [{T}, {G}, S], "
            f"got {selected.dtype} {list(selected.shape)}"
        )
    tables, S = step.block_tables, selected.shape[2]
    tiles = dict(tile("attend_selected", q.device) if settings is None else settings)
    share = triton.next_power_of_2(triton.cdiv(S, tiles.pop("SPLITS")))
    splits = triton.cdiv(S, share)
    block_p = min(tiles.pop("BLOCK_P"), triton.next_power_of_2(T * G))
    out, top, total = _parts(q, splits)
    launch(
        _attend_selected_kernel,
        (triton.cdiv(T * G, block_p), splits),
        q.device,
        q,
        cache.k,
        cache.v,
        cache.k_scale,
        cache.v_scale,
        tables,
        step.visible,
        selected,
        out,
        top,
        total,
        D**-0.5,
        T * G,
        tables.shape[1],
        step.q_len,
        G=G,
        S=S,
        GROUP=N // G,
        D=D,
        BLOCK=cache.block_size,
        SPLITS=splits,
        SHARE=share,
        BLOCK_C=max(16, triton.next_power_of_2(N // G)),
        BLOCK_P=block_p,
        **tiles,
    )
    return _merge_splits(out, top, total)


def attend(q: Tensor, cache: LayerCache, step: Step, settings: Settings | None = None) -> Tensor:
    """Fast arm of `mono.reference.ops.attention.attend`.

    Shapes:    q [T, N, D] bf16. Returns [T, N, D] bf16.
    Launch:    pairs of a request and a KV head x tiles of its Q N / G queries x splits, so that all rows of a
               request share a tile of keys; tile n belongs to split n modulo SPLITS. Then a merge.
    Rounding, Agrees, Errors: as `attend_selected`.
    """
    _, N, D, G = _check(q, cache, step, "attend")
    tables = step.block_tables
    tiles = dict(tile("attend", q.device) if settings is None else settings)
    splits, columns, pairs = tiles.pop("SPLITS"), step.q_len * N // G, step.requests * G
    block_c = max(16, min(tiles.pop("BLOCK_C"), triton.next_power_of_2(columns)))
    block_p = min(tiles.pop("BLOCK_P"), triton.next_power_of_2(pairs))
    out, top, total = _parts(q, splits)
    launch(
        _attend_kernel,
        (triton.cdiv(pairs, block_p), triton.cdiv(columns, block_c), splits),
        q.device,
        q,
        cache.k,
        cache.v,
        cache.k_scale,
        cache.v_scale,
        tables,
        step.visible,
        out,
        top,
        total,
        D**-0.5,
        pairs,
        tables.shape[1],
        step.q_len,
        G=G,
        GROUP=N // G,
        D=D,
        BLOCK=cache.block_size,
        SPLITS=splits,
        BLOCK_C=block_c,
        BLOCK_P=block_p,
        **tiles,
    )
    return _merge_splits(out, top, total)


def _check(q: Tensor, cache: LayerCache, step: Step, who: str) -> tuple[int, int, int, int]:
    """T, N, D, G, or ValueError."""
    G, D = cache.k.shape[2:]
    T, N, _ = q.shape
    if q.dtype != torch.bfloat16 or not q.is_contiguous() or q.shape[::2] != (step.rows, D) or N % G:
        raise ValueError(
            f"{who}: expected contiguous bf16 q [{step.rows}, a multiple of {G}, {D}], "
            f"got {q.dtype} {list(q.shape)}"
        )
    check_e4m3_cache(who, cache)
    return T, N, D, G


def _parts(q: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every split's unnormalised output, largest z and sum."""
    T, N, D = q.shape
    one = torch.empty((T, N, splits), dtype=torch.float32, device=q.device)
    return torch.empty((T, N, splits, D), dtype=torch.float32, device=q.device), one, torch.empty_like(one)


def _merge_splits(out: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """[T, N, D] bf16 from the splits' parts."""
    T, N, splits, D = out.shape
    y = torch.empty((T, N, D), dtype=torch.bfloat16, device=out.device)
    tiles = dict(tile("merge_splits", out.device))
    block_r = min(tiles.pop("BLOCK_R"), triton.next_power_of_2(T * N))
    launch(
        _merge_splits_kernel,
        (triton.cdiv(T * N, block_r),),
        out.device,
        out,
        top,
        total,
        y,
        T * N,
        SPLITS=splits,
        BLOCK_S=triton.next_power_of_2(splits),
        D=D,
        BLOCK_R=block_r,
        **tiles,
    )
    return y
