"""Block-sparse attention in Triton: an indexer picks the KV blocks, or an earlier layer's has picked them."""

from __future__ import annotations

from dataclasses import replace

from mono.caches import LayerCache
from mono.deployment import Deployment
from mono.fast.limits import in_format, refuse_formats, refuse_sizes
from mono.fast.ops.attention import attend_selected
from mono.fast.ops.index import MOST_BLOCKS, block_scores, select_blocks
from mono.fast.ops.linear import ptpc_linear, quantise_rows
from mono.fast.ops.norm_rope import norm_rope_insert, pack_norms
from mono.fast.ops.rms_norm import absorb_norm_ptpc
from mono.formats import PtpcFp8
from mono.interface import Carry, Layer
from mono.layers.checks import check_cache, check_weights
from mono.layers.sparse_attention import TYPE, Spec, Weights
from mono.parallel import Comm
from mono.step import Step


def refuse(spec: Spec, deployment: Deployment) -> str | None:
    """Why the kernels cannot serve this layer, or None."""
    width, topk = spec.index_dim, spec.topk_blocks
    if why := refuse_formats(deployment):
        return why
    if why := refuse_sizes(spec.head_dim, spec.rotary_dim, spec.group, spec.block_size):
        return why
    if width & (width - 1) or not 16 <= width <= 256 or spec.rotary_dim > width:
        return (
            f"index_dim is {width}, the kernels take a power of two from 16 to 256, "
            f"and no less than rotary_dim {spec.rotary_dim}"
        )
    if not 1 <= topk <= 64:
        return f"topk_blocks is {topk}, the kernels take 1 to 64"
    if spec.init_blocks + spec.local_blocks > topk:
        return f"{spec.init_blocks} + {spec.local_blocks} forced blocks do not fit into topk_blocks {topk}"
    if deployment.max_context > MOST_BLOCKS * spec.block_size:
        return (
            f"max_context is {deployment.max_context}, "
            f"the block selection ranks {MOST_BLOCKS} blocks of {spec.block_size}"
        )
    return None


def build(spec: Spec, weights: Weights, comm: Comm) -> Layer:
    """Keep the weights as they are stored, the four head norms packed into one tensor.

    Launches, in order: residual, norm and quantiser; qkv; head norms, RoPE and cache insert; block scores
    and selection if the layer selects; attention and merge; quantiser; o. Rounding as in the reference.
    """
    check_weights(TYPE, spec, weights, comm)
    qkv_matrix = in_format("sparse_attention.qkv", weights.qkv, PtpcFp8)
    o_matrix = in_format("sparse_attention.o", weights.o, PtpcFp8)
    norms = [weights.q_norm, weights.k_norm]
    if spec.selects:
        norms += [weights.index_q_norm, weights.index_k_norm]
    head_norms = pack_norms(*norms)
    index_dim = spec.index_dim if spec.selects else None

    def sparse_attention(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        check_cache(TYPE.name, spec, cache)
        partial = None if carry.partial is None else comm.all_reduce(carry.partial)
        residual, x8, scale = absorb_norm_ptpc(carry.residual, partial, weights.norm, spec.eps)
        qkv = ptpc_linear(x8, scale, qkv_matrix)  # [T, (N + 2 G) D + (G + 1) I]
        # every row's key is in the cache before any row selects or attends
        q, index_q = norm_rope_insert(
            qkv, head_norms, weights.rope, spec.eps, step, cache, spec.heads, index_dim
        )
        selected = carry.selected
        if index_q is not None:
            scores = block_scores(index_q, cache, step)  # [T, G, M]
            selected = select_blocks(
                scores, step.visible, spec.block_size, spec.topk_blocks, spec.init_blocks, spec.local_blocks
            )
        if selected is None:
            raise ValueError(
                "sparse_attention: this layer reuses a selection and no layer before it selected"
            )
        o = attend_selected(q, cache, step, selected)  # [T, N, D]
        partial = ptpc_linear(*quantise_rows(o.flatten(1)), o_matrix)  # [T, H]
        return replace(carry, residual=residual, partial=partial, selected=selected)

    return sparse_attention
