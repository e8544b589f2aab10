"""Mixture of experts, in Triton: six launches."""

from __future__ import annotations

from dataclasses import replace

from mono.caches import LayerCache
from mono.deployment import Deployment
from mono.fast.limits import in_format
from mono.fast.ops.experts import experts
from mono.fast.ops.rms_norm import absorb_norm_bf16, absorb_norm_mxfp8
from mono.fast.ops.router import route
from mono.formats import Mxfp4
from mono.interface import Carry, Layer
from mono.layers.checks import check_weights
from mono.layers.moe import TYPE, Spec, Weights
from mono.parallel import Comm
from mono.step import Step


def refuse(spec: Spec, deployment: Deployment) -> str | None:
    """Why the fused experts cannot serve this layer, or None."""
    if spec.routed_format != "mxfp4":
        return f"routed experts are {spec.routed_format}, the fused kernel reads mxfp4"
    if spec.shared == "apart":
        return "the shared expert is apart; deployment.shared_expert='fused' makes it one of the table"
    for name, size in (("hidden", spec.hidden), ("intermediate", spec.intermediate // deployment.tp_size)):
        if size % 32:
            return f"{name} is {size} on each rank, the kernel reads whole scale blocks of 32"
    return None


def build(spec: Spec, weights: Weights, comm: Comm) -> Layer:
    """Keep the weights as they are stored. ValueError, naming the field, for what `refuse` turns down.

    Rounding as in the reference. The norm kernel writes the bf16 norm, which the router reads, and, if the
    deployment rounds activations to MXFP8, those values too, which the experts read.
    """
    check_weights(TYPE, spec, weights, comm)
    gate_up = in_format("moe.gate_up", weights.gate_up, Mxfp4)
    down = in_format("moe.down", weights.down, Mxfp4)
    if spec.shared == "apart":
        raise ValueError("moe.shared: expected 'fused' or 'none', got 'apart'")
    mxfp8 = spec.activations == "mxfp8"

    def moe(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        partial = None if carry.partial is None else comm.all_reduce(carry.partial)
        if mxfp8:
            residual, x, rows = absorb_norm_mxfp8(carry.residual, partial, weights.norm, spec.eps)  # [T, H]
        else:
            residual, x = absorb_norm_bf16(carry.residual, partial, weights.norm, spec.eps)  # [T, H]
            rows = x
        ids, weight, slot_of = route(
            x, weights.router, weights.bias, spec.topk, spec.scaling, step.slots, spec.shared == "fused"
        )  # [T, slots] twice, [table, T]
        out = experts(
            rows, gate_up, down, ids, slot_of, weight, spec.alpha, spec.beta, spec.limit, mxfp8
        )  # [T, H] bf16
        return replace(carry, residual=residual, partial=out)

    return moe
