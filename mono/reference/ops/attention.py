"""Projection to heads, and softmax attention over the paged FP8 cache."""

from __future__ import annotations

import torch
from torch import Tensor

from mono.caches import LayerCache
from mono.reference.numerics import NATIVE, Numerics
from mono.reference.ops.rms_norm import gemma_rms_norm
from mono.reference.ops.rope import rope
from mono.step import Step


def norm_rope(
    x: Tensor, weight: Tensor, eps: float, table: Tensor, positions: Tensor, numerics: Numerics = NATIVE
) -> Tensor:
    """Normalise each head vector, turn it by its position, round once.

    Shapes:    x [T, heads, D] bf16. Returns [T, heads, D] bf16.
    Rounding:  fp32 through the norm and the rotation, one rounding to bf16 at the end.
    """
    return rope(gemma_rms_norm(x, weight, eps, numerics), table, positions).bfloat16()


def attend(
    q: Tensor, cache: LayerCache, step: Step, allowed: Tensor | None, numerics: Numerics = NATIVE
) -> Tensor:
    """Softmax attention of every row over its visible keys.

        z[t] = (sum_d q[d] k8[t, d]) k_scale[t] D^-1/2;  p = exp(z - max z)
        o[d] = sum_t (p[t] v_scale[t]) v8[t, d] / sum_t p[t]

    Shapes:    q [T, N, D] bf16; allowed [T, G, M] bool, KV blocks a row may read per KV head, or None
               for all. Returns [T, N, D] bf16.
    Rounding:  q as bf16 against the stored e4m3 codes, fp32 sums, p in fp32; one rounding at the end.
    A key past the row's last visible one, or outside its blocks, is never read into a product: dead
    slots may hold NaN. A row without keys returns zeros.
    """
    T, N, D = q.shape
    B, Q, G = step.requests, step.q_len, cache.k.shape[2]
    block, M = cache.block_size, step.block_tables.shape[1]
    tables = live_pages(step, block)  # [B, M]

    key = torch.arange(M * block, device=q.device)
    sees = (key[None, :] < step.visible.long()[:, None]).view(B, 1, 1, Q, M * block)
    if allowed is not None:
        per_key = (
            allowed.view(B, Q, G, M).permute(0, 2, 1, 3).repeat_interleave(block, dim=-1)
        )  # [B, G, Q, t]
        sees = sees & per_key.unsqueeze(2)
    ever = sees.any(dim=3).any(dim=2)  # [B, 1 or G, t], keys that some row of the request reads
    ever = ever.expand(B, G, M * block)

    def gather(values: Tensor) -> Tensor:  # [P, block, G, ...] -> [B, G, t, ...]
        rows = values[tables].flatten(1, 2)  # [B, t, G, ...]
        return rows.transpose(1, 2)

    k = _masked(gather(cache.k).float(), ever)  # [B, G, t, D]
    v = _masked(gather(cache.v).float(), ever)
    k_scale = torch.where(ever, gather(cache.k_scale), 0.0)  # [B, G, t]
    v_scale = torch.where(ever, gather(cache.v_scale), 0.0)

    grouped = q.float().view(B, Q, G, N // G, D).permute(0, 2, 3, 1, 4)  # [B, G, n, Q, D]
    z = numerics.matmul(grouped.flatten(2, 3), k).view(B, G, N // G, Q, -1)
    z = z * k_scale[:, :, None, None, :] * D**-0.5
    z = torch.where(sees, z, float("-inf"))
    top = z.amax(dim=-1, keepdim=True)
    p = torch.where(sees, torch.exp(z - torch.where(top == float("-inf"), 0.0, top)), 0.0)
    total = numerics.sum(p, -1)  # [B, G, n, Q]
    weighted = (p * v_scale[:, :, None, None, :]).flatten(2, 3)  # [B, G, n Q, t]
    o = numerics.matmul(weighted, v.mT).view(B, G, N // G, Q, D)
    o = o / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return o.permute(0, 3, 1, 2, 4).reshape(T, N, D).bfloat16()


def live_pages(step: Step, block: int) -> Tensor:
    """[B, M] int64 block tables with entries past a request's last block pointed at page 0."""
    blocks = (step.visible.long().view(step.requests, step.q_len).amax(dim=1) + block - 1) // block
    used = torch.arange(step.block_tables.shape[1], device=blocks.device)[None, :] < blocks[:, None]
    return torch.where(used, step.block_tables.long(), 0)


def _masked(x: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.unsqueeze(-1), x, 0.0)
