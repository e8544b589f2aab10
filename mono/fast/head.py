"""Final norm, logits and top-1, in Triton: four launches."""

from __future__ import annotations

from dataclasses import replace

from mono.caches import LayerCache
from mono.deployment import Deployment
from mono.fast.ops.linear import bf16_linear
from mono.fast.ops.rms_norm import absorb_norm_bf16
from mono.fast.ops.top1 import top1
from mono.formats import Bf16
from mono.interface import Carry, Layer
from mono.layers.checks import check_weights
from mono.layers.head import TYPE, Spec, Weights
from mono.parallel import Comm
from mono.step import Step


def refuse(spec: Spec, deployment: Deployment) -> str | None:
    """The fast arm serves every head."""
    return None


def build(spec: Spec, weights: Weights, comm: Comm) -> Layer:
    """Keep the weights as they are stored.

    Rounding as in the reference: norm output to bf16; logits stay fp32 up to the argmax.
    """
    check_weights(TYPE, spec, weights, comm)
    matrix = Bf16(weights.head)

    def head(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        partial = None if carry.partial is None else comm.all_reduce(carry.partial)
        residual, x = absorb_norm_bf16(carry.residual, partial, weights.norm, spec.eps)  # [T, H]
        logits = bf16_linear(x, matrix)  # [T, V] fp32
        return replace(carry, residual=residual, partial=None, logits=logits, top1=top1(logits, spec.vocab))

    return head
