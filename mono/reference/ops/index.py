"""The indexer: score KV blocks, pick the best."""

from __future__ import annotations

import torch
from torch import Tensor

from mono.caches import LayerCache
from mono.reference.numerics import NATIVE, Numerics
from mono.reference.ops.attention import live_pages, values_of
from mono.step import Step


def block_scores(index_q: Tensor, cache: LayerCache, step: Step, numerics: Numerics = NATIVE) -> Tensor:
    """Best dot product of an index query with the visible index keys of each KV block.

        s[g, b] = max over visible keys t of block b of sum_d iq[g, d] ik8[t, d]

    Shapes:    index_q [T, G, I] bf16. Returns [T, G, M] fp32; -inf for a block with no visible key.
    Rounding:  bf16 query times widened e4m3 key, fp32 sums. The softmax scale would change no choice,
               and is left out. A NaN among a block's visible keys makes its score NaN.
    Source:    the indexer of DeepSeek-V3.2 (sparse attention), with a maximum per block.
    """
    if cache.index_k is None:
        raise ValueError("block_scores: this layer has no index cache")
    T, G, width = index_q.shape
    B, Q, block, M = step.requests, step.q_len, cache.block_size, step.block_tables.shape[1]
    tables = live_pages(step, block)
    seen = step.visible.long().view(B, Q)

    key = torch.arange(M * block, device=index_q.device)
    ever = key[None, :] < seen.amax(dim=1)[:, None]  # [B, t]
    ik = values_of(cache.index_k[tables].flatten(1, 2))  # [B, t, I]
    ik = torch.where(ever.unsqueeze(-1), ik, 0.0)
    dots = numerics.matmul(index_q.float().view(B, Q * G, width), ik).view(B, Q, G, M * block)
    sees = key[None, None, :] < seen[:, :, None]  # [B, Q, t]
    dots = torch.where(sees.unsqueeze(2), dots, float("-inf"))
    return dots.view(T, G, M, block).amax(dim=-1)


def select_blocks(
    scores: Tensor, visible: Tensor, block_size: int, topk: int, init: int, local: int
) -> Tensor:
    """The `topk` best KV blocks of each row and head, ascending.

    Forced blocks come first: the row's `local` last blocks, then the `init` first ones, then the rest by
    score. Equal scores go to the higher block id, -0 equals +0, and NaN is the worst score.

    Shapes:    scores [T, G, M] fp32, visible [T] int32. Returns [T, G, topk] int32, -1 past the last.
    Errors:    ValueError if more blocks are forced than picked.
    """
    if init + local > topk:
        raise ValueError(f"select_blocks: {init} + {local} forced blocks do not fit into the {topk} picked")
    T, G, M = scores.shape
    blocks = ((visible.long() + block_size - 1) // block_size)[:, None, None]  # [T, 1, 1]
    block = torch.arange(M, device=scores.device)[None, None, :]
    clean = torch.where(scores.isnan(), float("-inf"), scores) + 0.0
    # rank classes, best last: 0 no key, 1 by score, 2 init, 3 local
    kind = torch.ones_like(block).expand(T, G, M)
    kind = torch.where(block < init, 2, kind)
    kind = torch.where(block >= blocks - local, 3, kind)
    kind = torch.where(block < blocks, kind, 0)

    order = torch.argsort(clean, dim=-1, stable=True)  # ascending; equal scores keep ascending ids
    order = order.gather(-1, torch.argsort(kind.gather(-1, order), dim=-1, stable=True))
    best = order[..., max(M - topk, 0) :]  # the last are the best
    best = torch.nn.functional.pad(best, (topk - best.shape[-1], 0), value=-1)
    usable = (best >= 0) & (best < blocks)
    past = torch.where(usable, best, M).sort(dim=-1).values
    return torch.where(past < M, past, -1).int()
