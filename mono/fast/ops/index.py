"""The indexer: score the KV blocks of the paged index cache, pick the best."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mono.caches import LayerCache
from mono.fast.launch import launch
from mono.fast.limits import check_e4m3_cache
from mono.fast.tiles import Settings, tile
from mono.step import Step

MOST_BLOCKS = 65536  # a program ranks a row's blocks in registers
MANY_BLOCKS = 2048  # a longer list of keys is spread over more threads
ABOVE = tl.constexpr(128)  # more than any TOPK


@triton.jit
def _block_scores_kernel(
    index_q_ptr,  # [B, C, I] bf16, C = Q G queries of a request, heads inside rows
    index_k_ptr,  # [slots, I] e4m3
    tables_ptr,  # [B, M] int32
    visible_ptr,  # [B, Q] int32
    scores_ptr,  # [B, C, M] fp32
    M,
    C,
    G,
    I: tl.constexpr,  # noqa: E741  the letter of the shape
    BLOCK: tl.constexpr,  # tokens of a KV block
    SPAN: tl.constexpr,  # KV blocks a program scores
    BLOCK_C: tl.constexpr,
):
    """SPAN blocks of one request against BLOCK_C of its queries, so that a key is read once for all rows."""
    first = tl.program_id(0) * SPAN
    request = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    key = first * BLOCK + tl.arange(0, SPAN * BLOCK)
    block = first + tl.arange(0, SPAN)
    i = tl.arange(0, I)

    inside = column < C
    query = request * C + column
    visible = tl.load(visible_ptr + request * (C // G) + column // G, mask=inside, other=0)
    most = tl.max(visible, axis=0)

    score = tl.full((SPAN, BLOCK_C), float("-inf"), tl.float32)
    if first * BLOCK < most:
        # keys past every row's last are not read: a dead slot may hold anything
        live = key < most
        page = tl.load(tables_ptr + request * M + key // BLOCK, mask=live, other=0).to(tl.int64)
        slot = page * BLOCK + key % BLOCK
        index_k = tl.load(index_k_ptr + slot[:, None] * I + i[None, :], mask=live[:, None], other=0.0)
        index_q = tl.load(index_q_ptr + query[:, None] * I + i[None, :], mask=inside[:, None], other=0.0)
        dots = tl.dot(index_k.to(tl.bfloat16), tl.trans(index_q))  # [SPAN BLOCK, BLOCK_C]
        sees = key[:, None] < visible[None, :]
        # a maximum passes over NaN, which must instead spoil its block
        spoilt = tl.where(sees & (dots != dots), 1, 0)
        dots = tl.where(sees, dots, float("-inf"))
        score = tl.max(tl.reshape(dots, (SPAN, BLOCK, BLOCK_C)), axis=1)
        spoilt = tl.max(tl.reshape(spoilt, (SPAN, BLOCK, BLOCK_C)), axis=1)
        score = tl.where(spoilt > 0, float("nan"), score)

    at = query[None, :] * M + block[:, None]
    tl.store(scores_ptr + at, score, mask=inside[None, :] & (block < M)[:, None])


def block_scores(index_q: Tensor, cache: LayerCache, step: Step, settings: Settings | None = None) -> Tensor:
    """Fast arm of `mono.reference.ops.index.block_scores`.

    Shapes:  index_q [T, G, I] bf16. Returns [T, G, M] fp32; -inf for a block with no visible key.
    Launch:  spans of KV blocks x requests x tiles of the request's Q G queries, whatever the lengths: a span
             past the request's end reads nothing and writes -inf.
    Agrees:  but for the order of the fp32 sum over I, of exact products: within I 2^-24 sum |q k|. A NaN
             among a block's visible keys makes its score NaN.
    Errors:  ValueError, naming the tensor, on another type, shape or layout.
    """
    if cache.index_k is None:
        raise ValueError("block_scores: this layer has no index cache")
    check_e4m3_cache("block_scores", cache)
    T, G, I = index_q.shape  # noqa: E741
    if index_q.dtype != torch.bfloat16 or not index_q.is_contiguous() or step.rows != T:
        raise ValueError(
            f"block_scores: expected contiguous bf16 index_q [{step.rows}, G, {cache.index_k.shape[2]}], "
            f"got {index_q.dtype} {list(index_q.shape)}"
        )
    tables = step.block_tables
    M, block, columns = tables.shape[1], cache.block_size, step.q_len * G
    scores = torch.empty((T, G, M), dtype=torch.float32, device=index_q.device)
    tiles = dict(tile("block_scores", index_q.device) if settings is None else settings)
    span = max(1, min(tiles.pop("KEYS") // block, triton.next_power_of_2(M)))
    block_c = max(16, min(tiles.pop("BLOCK_C"), triton.next_power_of_2(columns)))
    launch(
        _block_scores_kernel,
        (triton.cdiv(M, span), step.requests, triton.cdiv(columns, block_c)),
        index_q.device,
        index_q,
        cache.index_k,
        tables,
        step.visible,
        scores,
        M,
        columns,
        G,
        I=I,
        BLOCK=block,
        SPAN=span,
        BLOCK_C=block_c,
        **tiles,
    )
    return scores


@triton.jit
def _pick(
    scores_ptr,
    selected_ptr,
    row,  # [BLOCK_R] int64
    inside,  # [BLOCK_R]
    blocks,  # [BLOCK_R] int32, KV blocks with a visible key
    M,
    TOPK: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,  # at least as many as any row's blocks
):
    """Keep the TOPK best of each row's first WIDTH blocks, by integer keys in the order of the ranks."""
    block = tl.arange(0, WIDTH)[None, :]
    ranked = block < blocks[:, None]
    score = tl.load(scores_ptr + row[:, None] * M + block, mask=ranked, other=0.0)
    score = tl.where(score != score, float("-inf"), score)
    score = tl.where(score == 0.0, 0.0, score)  # -0 ranks as +0
    bits = score.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # +inf is 0x7F800000, -inf -0x7F800001: both ends are free
    key = tl.where(block < INIT, 0x7FFFFFFE, key)
    key = tl.where(block >= blocks[:, None] - LOCAL, 0x7FFFFFFF, key)
    key = tl.where(ranked, key, -0x80000000)

    # down through the distinct keys until TOPK blocks have one at least as large
    least = tl.max(key, axis=1, keep_dims=True)
    for _ in range(1, TOPK):
        enough = tl.sum((key >= least).to(tl.int32), axis=1, keep_dims=True) >= TOPK
        lower = tl.max(tl.where(key < least, key, -0x80000000), axis=1, keep_dims=True)
        least = tl.where(enough, least, lower)
    least = tl.maximum(least, -0x7FFFFFFF)  # never the key of a block that is not ranked
    # of the blocks that tie at the least key, those with the highest ids fill what is left; one running
    # count holds the blocks above in its low bits and the ties in its high ones
    part = tl.where(key > least, 1, tl.where(key == least, ABOVE, 0))
    run = tl.cumsum(part, axis=1)
    counts = tl.max(run, axis=1, keep_dims=True)
    passed_over = tl.maximum(counts // ABOVE + counts % ABOVE - TOPK, 0)
    tie = run // ABOVE
    picked = (part == 1) | ((part == ABOVE) & (tie > passed_over))
    place = run % ABOVE + tl.maximum(tie - passed_over, 0) - 1
    tl.store(
        selected_ptr + row[:, None] * TOPK + place,
        tl.broadcast_to(block, picked.shape),
        mask=picked & inside[:, None],
    )
    slot = tl.arange(0, SLOTS)[None, :]
    empty = (slot >= tl.minimum(blocks, TOPK)[:, None]) & (slot < TOPK) & inside[:, None]
    tl.store(selected_ptr + row[:, None] * TOPK + slot, -1, mask=empty)


@triton.jit
def _select_blocks_kernel(
    scores_ptr,  # [T, G, M] fp32
    visible_ptr,  # [T] int32
    selected_ptr,  # [T, G, TOPK] int32
    rows,  # T G
    M,
    G,
    BLOCK_SIZE: tl.constexpr,
    TOPK: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    SLOTS: tl.constexpr,  # power of two, at least TOPK
    WIDTH: tl.constexpr,  # power of two, at least M
    NARROW: tl.constexpr,
    MIDDLE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """BLOCK_R pairs of a row and a head a program; a whole list of keys in registers."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < rows
    visible = tl.load(visible_ptr + row // G, mask=inside, other=0)
    blocks = tl.minimum((visible + BLOCK_SIZE - 1) // BLOCK_SIZE, M)
    most = tl.max(blocks, axis=0)
    if most <= NARROW:
        _pick(scores_ptr, selected_ptr, row, inside, blocks, M, TOPK, INIT, LOCAL, SLOTS, NARROW)
    elif most <= MIDDLE:
        _pick(scores_ptr, selected_ptr, row, inside, blocks, M, TOPK, INIT, LOCAL, SLOTS, MIDDLE)
    else:
        _pick(scores_ptr, selected_ptr, row, inside, blocks, M, TOPK, INIT, LOCAL, SLOTS, WIDTH)


def select_blocks(
    scores: Tensor,
    visible: Tensor,
    block_size: int,
    topk: int,
    init: int,
    local: int,
    settings: Settings | None = None,
) -> Tensor:
    """Fast arm of `mono.reference.ops.index.select_blocks`.

    Shapes:  scores [T, G, M] fp32, visible [T] int32. Returns [T, G, topk] int32, ascending, -1 past the
             last.
    Launch:  a few pairs of row and head a program; `topk` maxima over integer keys find the least one
             that is picked, a running count settles its ties and places the picked ids. Scores of blocks
             without a visible key are not read.
    Agrees:  exactly.
    Errors:  ValueError if more blocks are forced than picked, on more than 65536 blocks, or on another type
             or layout.
    """
    if init + local > topk:
        raise ValueError(f"select_blocks: {init} + {local} forced blocks do not fit into the {topk} picked")
    T, G, M = scores.shape
    if scores.dtype != torch.float32 or not scores.is_contiguous() or M > MOST_BLOCKS:
        raise ValueError(
            f"select_blocks: expected contiguous fp32 scores [T, G, at most {MOST_BLOCKS}], "
            f"got {scores.dtype} {list(scores.shape)}"
        )
    if visible.dtype != torch.int32 or visible.shape != (T,):
        raise ValueError(
            f"select_blocks: expected visible int32 [{T}], got {visible.dtype} {list(visible.shape)}"
        )
    selected = torch.empty((T, G, topk), dtype=torch.int32, device=scores.device)
    name = "select_blocks" if M <= MANY_BLOCKS else "select_blocks_of_many"
    tiles = dict(tile(name, scores.device) if settings is None else settings)
    block_r = min(tiles.pop("BLOCK_R"), triton.next_power_of_2(T * G))
    width = triton.next_power_of_2(M)
    launch(
        _select_blocks_kernel,
        (triton.cdiv(T * G, block_r),),
        scores.device,
        scores,
        visible,
        selected,
        T * G,
        M,
        G,
        BLOCK_SIZE=block_size,
        TOPK=topk,
        INIT=init,
        LOCAL=local,
        SLOTS=triton.next_power_of_2(topk),
        WIDTH=width,
        NARROW=min(tiles.pop("NARROW"), width),
        MIDDLE=min(tiles.pop("MIDDLE"), width),
        BLOCK_R=block_r,
        **tiles,
    )
    return selected
