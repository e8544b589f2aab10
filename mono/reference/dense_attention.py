"""Full causal attention, in PyTorch: norm, qkv, head norms and RoPE, attention, output projection."""

from __future__ import annotations

from dataclasses import replace

from mono.caches import LayerCache
from mono.deployment import Deployment
from mono.interface import Carry, Layer
from mono.layers.checks import check_cache, check_weights
from mono.layers.dense_attention import TYPE, Spec, Weights
from mono.parallel import Comm
from mono.reference.numerics import NATIVE, Numerics
from mono.reference.ops.attention import attend, norm_rope
from mono.reference.ops.linear import linear
from mono.reference.ops.rms_norm import absorb, gemma_rms_norm
from mono.step import Step


def refuse(spec: Spec, deployment: Deployment) -> str | None:
    """The reference serves every full-attention layer."""
    return None


def build(spec: Spec, weights: Weights, comm: Comm, numerics: Numerics = NATIVE) -> Layer:
    """Keep the weights as they are stored.

    Rounding, in order: residual to bf16; the fp32 norm output straight into qkv's row quantiser; qkv to
    bf16; q and k to bf16 after norm and RoPE; k and v to e4m3 with a scale per token and head; attention
    output to bf16; o's output to bf16.
    """
    check_weights(TYPE, spec, weights, comm)
    N, G, D = spec.heads, spec.kv_heads, spec.head_dim

    def dense_attention(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        check_cache(TYPE.name, spec, cache)
        T = step.rows
        total = absorb(carry, comm)  # [T, H] fp32
        x = gemma_rms_norm(total, weights.norm, spec.eps, numerics)  # [T, H] fp32, of the unrounded sum
        qkv = linear(x, weights.qkv, numerics).bfloat16()  # [T, (N + 2 G) D]
        q, k, v = qkv.split([N * D, G * D, G * D], dim=1)
        q = norm_rope(q.view(T, N, D), weights.q_norm, spec.eps, weights.rope, step.positions, numerics)
        k = norm_rope(k.view(T, G, D), weights.k_norm, spec.eps, weights.rope, step.positions, numerics)
        # every row's key is in the cache before any row attends
        cache.insert_kv(step.slots, k, v.view(T, G, D))
        o = attend(q, cache, step, numerics)  # [T, N, D]
        partial = linear(o.reshape(T, N * D), weights.o, numerics).bfloat16()  # [T, H]
        return replace(carry, residual=total.bfloat16(), partial=partial)

    return dense_attention
