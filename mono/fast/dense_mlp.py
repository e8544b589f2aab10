"""The dense MLP, in Triton: four launches."""

from __future__ import annotations

from dataclasses import replace

from mono.caches import LayerCache
from mono.deployment import Deployment
from mono.fast.limits import in_format
from mono.fast.ops.linear import ptpc_linear
from mono.fast.ops.rms_norm import absorb_norm_ptpc
from mono.fast.ops.swiglu import swiglu_ptpc
from mono.formats import PtpcFp8
from mono.interface import Carry, Layer
from mono.layers.checks import check_weights
from mono.layers.dense_mlp import TYPE, Spec, Weights
from mono.parallel import Comm
from mono.step import Step


def refuse(spec: Spec, deployment: Deployment) -> str | None:
    """Why the PTPC FP8 kernels cannot serve this layer, or None."""
    if deployment.linears != "ptpc_fp8":
        return f"linears are {deployment.linears!r}, the kernels read deployment.linears='ptpc_fp8'"
    return None


def build(spec: Spec, weights: Weights, comm: Comm) -> Layer:
    """Keep the weights as they are stored. ValueError, naming the field, if they are not PTPC FP8.

    Rounding as in the reference: the fp32 norm output goes straight into gate_up's row quantiser, SwiGLU
    through bf16 into down's.
    """
    check_weights(TYPE, spec, weights, comm)
    gate_up = in_format("dense_mlp.gate_up", weights.gate_up, PtpcFp8)
    down = in_format("dense_mlp.down", weights.down, PtpcFp8)

    def dense_mlp(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        partial = None if carry.partial is None else comm.all_reduce(carry.partial)
        residual, x8, x_scale = absorb_norm_ptpc(carry.residual, partial, weights.norm, spec.eps)  # [T, H]
        h = ptpc_linear(x8, x_scale, gate_up)  # [T, 2 F] bf16
        act8, act_scale = swiglu_ptpc(h, spec.alpha, spec.beta, spec.limit)  # [T, F]
        return replace(carry, residual=residual, partial=ptpc_linear(act8, act_scale, down))

    return dense_mlp
