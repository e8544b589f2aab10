"""Block-sparse attention, in PyTorch: as full attention, with an indexer that picks the KV blocks."""

from __future__ import annotations

from dataclasses import replace

from mono.caches import LayerCache
from mono.deployment import Deployment
from mono.interface import Carry, Layer
from mono.layers.checks import check_cache, check_weights
from mono.layers.sparse_attention import TYPE, Spec, Weights
from mono.parallel import Comm
from mono.reference.numerics import NATIVE, Numerics
from mono.reference.ops.attention import attend_selected, norm_rope
from mono.reference.ops.index import block_scores, select_blocks
from mono.reference.ops.linear import linear
from mono.reference.ops.rms_norm import absorb, gemma_rms_norm
from mono.step import Step


def refuse(spec: Spec, deployment: Deployment) -> str | None:
    """The reference serves every sparse layer."""
    return None


def build(spec: Spec, weights: Weights, comm: Comm, numerics: Numerics = NATIVE) -> Layer:
    """Keep the weights as they are stored.

    Rounding as in dense attention; besides, index queries and keys to bf16 after norm and RoPE, and
    index keys to e4m3 at unit scale. A layer that reuses a selection computes the index columns of the
    packed product and leaves them unused: neither index queries nor index keys exist there.
    """
    check_weights(TYPE, spec, weights, comm)
    N, G, D, index_dim = spec.heads, spec.kv_heads, spec.head_dim, spec.index_dim

    def sparse_attention(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        check_cache(TYPE.name, spec, cache)
        T, positions = step.rows, step.positions
        total = absorb(carry, comm)  # [T, H] fp32
        x = gemma_rms_norm(total, weights.norm, spec.eps, numerics)  # [T, H] fp32, of the unrounded sum
        qkv = linear(x, weights.qkv, numerics).bfloat16()  # [T, (N + 2 G) D + (G + 1) I]
        q, k, v, iq, ik = qkv.split([N * D, G * D, G * D, G * index_dim, index_dim], dim=1)
        q = norm_rope(q.view(T, N, D), weights.q_norm, spec.eps, weights.rope, positions, numerics)
        k = norm_rope(k.view(T, G, D), weights.k_norm, spec.eps, weights.rope, positions, numerics)
        # every row's key is in the cache before any row selects or attends
        cache.insert_kv(step.slots, k, v.view(T, G, D))
        if spec.selects:
            iq = norm_rope(
                iq.view(T, G, index_dim), weights.index_q_norm, spec.eps, weights.rope, positions, numerics
            )
            ik = norm_rope(
                ik.view(T, 1, index_dim), weights.index_k_norm, spec.eps, weights.rope, positions, numerics
            )
            cache.insert_index_k(step.slots, ik[:, 0])
            scores = block_scores(iq, cache, step, numerics)  # [T, G, M]
            selected = select_blocks(
                scores, step.visible, spec.block_size, spec.topk_blocks, spec.init_blocks, spec.local_blocks
            )
        elif carry.selected is not None:
            selected = carry.selected
        else:
            raise ValueError(
                "sparse_attention: this layer reuses a selection and no layer before it selected"
            )
        o = attend_selected(q, cache, step, selected, numerics)  # [T, N, D]
        partial = linear(o.reshape(T, N * D), weights.o, numerics).bfloat16()  # [T, H]
        return replace(carry, residual=total.bfloat16(), partial=partial, selected=selected)

    return sparse_attention
