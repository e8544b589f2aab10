"""Rows of the embedding table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mono.fast.launch import launch
from mono.fast.tiles import fitted, tile


@triton.jit
def _embed_kernel(
    tokens_ptr,  # [T] int64
    table_ptr,  # [V, H] bf16, rows table_stride elements apart
    out_ptr,  # [T, H] bf16, out
    table_stride,
    T,
    H,
    vocab,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """BLOCK_T rows and BLOCK_H columns to a program."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = (t < T)[:, None] & (h < H)[None, :]

    token = tl.load(tokens_ptr + t, mask=t < T, other=0)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)  # a padding row may carry any id
    row = tl.load(table_ptr + token[:, None] * table_stride + h[None, :], mask=inside, other=0.0)

    tl.store(out_ptr + t[:, None] * H + h[None, :], row, mask=inside)


def embed(tokens: Tensor, table: Tensor, vocab: int) -> Tensor:
    """`table[clamp(tokens, 0, vocab - 1)]`.

    Shapes:  tokens [T] int64, table [V, H] bf16. Returns [T, H] bf16.
    Agrees:  exactly.
    Errors:  ValueError, naming the argument, for another dtype or layout, or a vocabulary beyond the table.
    """
    if tokens.dtype != torch.int64 or tokens.dim() != 1 or not tokens.is_contiguous():
        raise ValueError(
            f"embed: tokens are {tokens.dtype} {list(tokens.shape)}, expected contiguous int64 [T]"
        )
    if table.dtype != torch.bfloat16 or table.stride(1) != 1 or not 0 < vocab <= table.shape[0]:
        raise ValueError(
            f"embed: table is {table.dtype} {list(table.shape)} with stride {table.stride(1)} along H, "
            f"expected bf16 with 1 and at least {vocab} rows"
        )
    T, H = tokens.shape[0], table.shape[1]
    out = torch.empty((T, H), dtype=torch.bfloat16, device=table.device)
    settings = fitted(tile("embed", table.device), BLOCK_H=H)
    launch(
        _embed_kernel,
        (triton.cdiv(T, settings["BLOCK_T"]), triton.cdiv(H, settings["BLOCK_H"])),
        table.device,
        tokens,
        table,
        out,
        table.stride(0),
        T,
        H,
        vocab,
        **settings,
    )
    return out
