"""Full causal attention in Triton: norm, qkv, head norms and RoPE, attention, output projection."""

from __future__ import annotations

from dataclasses import replace

from mono.caches import LayerCache
from mono.deployment import Deployment
from mono.fast.limits import in_format, refuse_formats, refuse_sizes
from mono.fast.ops.attention import attend
from mono.fast.ops.linear import ptpc_linear, quantise_rows
from mono.fast.ops.norm_rope import norm_rope_insert, pack_norms
from mono.fast.ops.rms_norm import absorb_norm_ptpc
from mono.formats import PtpcFp8
from mono.interface import Carry, Layer
from mono.layers.checks import check_cache, check_weights
from mono.layers.dense_attention import TYPE, Spec, Weights
from mono.parallel import Comm
from mono.step import Step


def refuse(spec: Spec, deployment: Deployment) -> str | None:
    """Why the kernels cannot serve this layer, or None."""
    return refuse_formats(deployment) or refuse_sizes(
        spec.head_dim, spec.rotary_dim, spec.group, spec.block_size
    )


def build(spec: Spec, weights: Weights, comm: Comm) -> Layer:
    """Keep the weights as they are stored, both head norms packed into one tensor.

    Launches, in order: residual, norm and quantiser; qkv; head norms, RoPE and cache insert; attention and
    merge; quantiser; o. Rounding as in the reference.
    """
    check_weights(TYPE, spec, weights, comm)
    qkv_matrix = in_format("dense_attention.qkv", weights.qkv, PtpcFp8)
    o_matrix = in_format("dense_attention.o", weights.o, PtpcFp8)
    head_norms = pack_norms(weights.q_norm, weights.k_norm)

    def dense_attention(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        check_cache(TYPE.name, spec, cache)
        partial = None if carry.partial is None else comm.all_reduce(carry.partial)
        residual, x8, scale = absorb_norm_ptpc(carry.residual, partial, weights.norm, spec.eps)
        qkv = ptpc_linear(x8, scale, qkv_matrix)  # [T, (N + 2 G) D]
        # every row's key is in the cache before any row attends
        q, _ = norm_rope_insert(qkv, head_norms, weights.rope, spec.eps, step, cache, spec.heads)
        o = attend(q, cache, step)  # [T, N, D]
        partial = ptpc_linear(*quantise_rows(o.flatten(1)), o_matrix)  # [T, H]
        return replace(carry, residual=residual, partial=partial)

    return dense_attention
