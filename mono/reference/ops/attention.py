"""Projection to heads, and softmax attention over the paged FP8 cache."""

from __future__ import annotations

import torch
from torch import Tensor

from mono.caches import LayerCache
from mono.formats import e4m3
from mono.reference.numerics import NATIVE, Numerics
from mono.reference.ops.rms_norm import gemma_rms_norm
from mono.reference.ops.rope import rope
from mono.step import Step

# values of K gathered at once in attend_selected; rows are independent, so chunks change nothing
_GATHERED = 1 << 24


def norm_rope(
    x: Tensor, weight: Tensor, eps: float, table: Tensor, positions: Tensor, numerics: Numerics = NATIVE
) -> Tensor:
    """Normalise each head vector, turn it by its position, round once.

    Shapes:    x [T, heads, D] bf16. Returns [T, heads, D] bf16.
    Rounding:  fp32 through the norm and the rotation, one rounding to bf16 at the end.
    """
    return rope(gemma_rms_norm(x, weight, eps, numerics), table, positions).bfloat16()


def attend(q: Tensor, cache: LayerCache, step: Step, numerics: Numerics = NATIVE) -> Tensor:
    """Softmax attention of every row over all its visible keys.

    Shapes:    q [T, N, D] bf16. Returns [T, N, D] bf16.
    Rounding and dead slots as in `softmax_attention`.
    """
    T, N, D = q.shape
    B, Q, G = step.requests, step.q_len, cache.k.shape[2]
    block, M = cache.block_size, step.block_tables.shape[1]
    pages = live_pages(step, block)  # [B, M]

    def gather(values: Tensor) -> Tensor:  # [P, block, G, ...] -> [B, G, t, ...]
        return values[pages].flatten(1, 2).transpose(1, 2)

    key = torch.arange(M * block, device=q.device)
    sees = (key < step.visible.long()[:, None]).view(B, 1, 1, Q, M * block)
    queries = q.view(B, Q, G, N // G, D).permute(0, 2, 3, 1, 4)  # [B, G, n, Q, D]
    o = softmax_attention(
        queries,
        gather(cache.k),
        gather(cache.k_scale),
        gather(cache.v),
        gather(cache.v_scale),
        sees,
        numerics,
    )
    return o.permute(0, 3, 1, 2, 4).reshape(T, N, D)


def attend_selected(
    q: Tensor, cache: LayerCache, step: Step, selected: Tensor, numerics: Numerics = NATIVE
) -> Tensor:
    """Softmax attention of every row over the visible keys of the KV blocks it selected.

    Shapes:    q [T, N, D] bf16; selected [T, G, S] int32, -1 for none. Returns [T, N, D] bf16.
    Rounding and dead slots as in `softmax_attention`.
    """
    T, N, D = q.shape
    G, S, block = cache.k.shape[2], selected.shape[2], cache.block_size
    offset = torch.arange(block, device=q.device)
    request = torch.arange(T, device=q.device) // step.q_len
    head = torch.arange(G, device=q.device)[:, None, None]

    def rows(part: slice) -> Tensor:
        blocks = selected[part].long()  # [t, G, S]
        key = (blocks.unsqueeze(-1) * block + offset).flatten(2)  # [t, G, S block]
        sees = (blocks >= 0).repeat_interleave(block, dim=-1) & (
            key < step.visible[part].long()[:, None, None]
        )
        first = sees.view(*blocks.shape, block)[..., 0]  # blocks with a visible key
        table = step.block_tables[request[part]].long().unsqueeze(1).expand(-1, G, -1)  # [t, G, M]
        page = torch.where(first, table.gather(2, blocks.clamp(0, table.shape[2] - 1)), 0)  # [t, G, S]

        def gather(values: Tensor) -> Tensor:  # [P, block, G, ...] -> [t, G, S block, ...]
            return values[page.unsqueeze(-1), offset, head].flatten(2, 3)

        queries = q[part].view(-1, G, N // G, 1, D)
        o = softmax_attention(
            queries,
            gather(cache.k),
            gather(cache.k_scale),
            gather(cache.v),
            gather(cache.v_scale),
            sees[:, :, None, None, :],
            numerics,
        )
        return o.reshape(-1, N, D)

    chunk = max(1, _GATHERED // (G * S * block * D))
    return torch.cat([rows(slice(t, t + chunk)) for t in range(0, T, chunk)])


def softmax_attention(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    v: Tensor,
    v_scale: Tensor,
    sees: Tensor,
    numerics: Numerics = NATIVE,
) -> Tensor:
    """Grouped queries over the keys they share, each query with its own mask.

        z[t] = (sum_d q[d] k8[t, d]) k_scale[t] D^-1/2;  p = exp(z - max z)
        o[d] = sum_t (p[t] v_scale[t]) v8[t, d] / sum_t p[t]

    Shapes:    q [B, G, n, Q, D] bf16; k, v [B, G, t, D] as the cache stores them; k_scale, v_scale
               [B, G, t] fp32; sees [B, G or 1, 1, Q, t] bool. Returns [B, G, n, Q, D] bf16.
    Rounding:  q as bf16 against the stored codes, fp32 sums, p in fp32; one rounding at the end.
    A key that no query sees is never read into a product: dead slots may hold NaN. A query without keys
    returns zeros.
    """
    B, G, n, Q, D = q.shape
    ever = sees.any(dim=3).any(dim=2).expand(B, G, k.shape[2])  # keys that some query reads
    k, v = (torch.where(ever.unsqueeze(-1), values_of(x), 0.0) for x in (k, v))
    k_scale, v_scale = (torch.where(ever, x, 0.0)[:, :, None, None, :] for x in (k_scale, v_scale))

    z = numerics.matmul(q.float().flatten(2, 3), k).view(B, G, n, Q, -1) * k_scale * D**-0.5
    z = torch.where(sees, z, float("-inf"))
    top = z.amax(dim=-1, keepdim=True)
    p = torch.where(sees, torch.exp(z - torch.where(top == float("-inf"), 0.0, top)), 0.0)
    total = numerics.sum(p, -1).unsqueeze(-1)  # [B, G, n, Q, 1]
    o = numerics.matmul((p * v_scale).flatten(2, 3), v.mT).view(B, G, n, Q, D)
    return (o / torch.where(total == 0, 1.0, total)).bfloat16()


def values_of(stored: Tensor) -> Tensor:
    """fp32 of what a cache stores, before any scale: e4m3 codes or bf16 values."""
    return e4m3.decode(stored) if stored.dtype == torch.float8_e4m3fn else stored.float()


def live_pages(step: Step, block: int) -> Tensor:
    """[B, M] int64 block tables with entries past a request's last block pointed at page 0."""
    blocks = (step.visible.long().view(step.requests, step.q_len).amax(dim=1) + block - 1) // block
    used = torch.arange(step.block_tables.shape[1], device=blocks.device)[None, :] < blocks[:, None]
    return torch.where(used, step.block_tables.long(), 0)
