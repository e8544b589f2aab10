"""The winning token of each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mono.fast.launch import launch
from mono.fast.ops.device import NO_KEY, key_index, rank_key
from mono.fast.tiles import fitted, tile


@triton.jit
def _tile_top1_kernel(
    logits_ptr,  # [T, V] fp32, rows logits_stride elements apart
    key_ptr,  # [T, tiles] int64, out: best key of each tile
    logits_stride,
    T,
    vocab,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """BLOCK_T rows and one tile of the true vocabulary to a program."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (t < T)[:, None] & (v < vocab)[None, :]

    logits = tl.load(logits_ptr + t[:, None] * logits_stride + v[None, :], mask=inside, other=0.0)
    key = tl.where(inside, rank_key(logits, v[None, :]), NO_KEY)

    tl.store(key_ptr + t * tl.num_programs(1) + tl.program_id(1), tl.max(key, axis=1), mask=t < T)


@triton.jit
def _best_tile_kernel(
    key_ptr,  # [T, tiles] int64
    top1_ptr,  # [T] int64, out
    T,
    tiles,
    BLOCK_T: tl.constexpr,
    BLOCK_TILES: tl.constexpr,  # power of two, at least `tiles`
):
    """BLOCK_T rows to a program."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_TILES)
    inside = (t < T)[:, None] & (i < tiles)[None, :]
    key = tl.load(key_ptr + t[:, None] * tiles + i[None, :], mask=inside, other=NO_KEY)
    tl.store(top1_ptr + t, key_index(tl.max(key, axis=1)).to(tl.int64), mask=t < T)


def top1(logits: Tensor, vocab: int) -> Tensor:
    """Fast arm of `mono.reference.ops.top1.top1`.

    Launch:  the best of each tile of the vocabulary, then the best tile.
    Agrees:  exactly, on any logits: ties, both zeros, infinities and NaN included.
    Errors:  ValueError for another dtype, a stride along V, or a vocabulary beyond the logits.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or not 0 < vocab <= logits.shape[1]:
        raise ValueError(
            f"top1: logits are {logits.dtype} {list(logits.shape)}, expected fp32 [T, V], V at least {vocab}"
        )
    if logits.stride(1) != 1:
        raise ValueError(f"top1: logits have stride {logits.stride(1)} along V, the kernel reads 1")
    T = logits.shape[0]
    settings = fitted(tile("tile_top1", logits.device), BLOCK_V=vocab)
    tiles = triton.cdiv(vocab, settings["BLOCK_V"])
    key = torch.empty((T, tiles), dtype=torch.int64, device=logits.device)
    best = torch.empty(T, dtype=torch.int64, device=logits.device)
    launch(
        _tile_top1_kernel,
        (triton.cdiv(T, settings["BLOCK_T"]), tiles),
        logits.device,
        logits,
        key,
        logits.stride(0),
        T,
        vocab,
        **settings,
    )
    settings = dict(tile("best_tile", logits.device))
    launch(
        _best_tile_kernel,
        (triton.cdiv(T, settings["BLOCK_T"]),),
        logits.device,
        key,
        best,
        T,
        tiles,
        BLOCK_TILES=triton.next_power_of_2(tiles),
        **settings,
    )
    return best
