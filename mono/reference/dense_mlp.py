"""The dense MLP, in PyTorch."""

from __future__ import annotations

from dataclasses import replace

from mono.caches import LayerCache
from mono.deployment import Deployment
from mono.interface import Carry, Layer
from mono.layers.checks import check_weights
from mono.layers.dense_mlp import TYPE, Spec, Weights
from mono.parallel import Comm
from mono.reference.numerics import NATIVE, Numerics
from mono.reference.ops.linear import linear
from mono.reference.ops.rms_norm import absorb, gemma_rms_norm
from mono.reference.ops.swiglu import swiglu_oai
from mono.step import Step


def refuse(spec: Spec, deployment: Deployment) -> str | None:
    """The reference serves every dense MLP."""
    return None


def build(spec: Spec, weights: Weights, comm: Comm, numerics: Numerics = NATIVE) -> Layer:
    """Keep the weights as they are stored.

    Rounding, in order: residual to bf16; the fp32 norm output straight into gate_up's row quantiser;
    gate_up to bf16; SwiGLU to bf16; down's output to bf16.
    """
    check_weights(TYPE, spec, weights, comm)

    def dense_mlp(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        total = absorb(carry, comm)  # [T, H] fp32
        x = gemma_rms_norm(total, weights.norm, spec.eps, numerics)  # [T, H] fp32, of the unrounded sum
        gate_up = linear(x, weights.gate_up, numerics).bfloat16()  # [T, 2 F]
        act = swiglu_oai(gate_up, spec.alpha, spec.beta, spec.limit).bfloat16()  # [T, F]
        partial = linear(act, weights.down, numerics).bfloat16()  # [T, H]
        return replace(carry, residual=total.bfloat16(), partial=partial)

    return dense_mlp
