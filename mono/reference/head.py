"""Final norm, logits and top-1, in PyTorch."""

from __future__ import annotations

from dataclasses import replace

from mono.caches import LayerCache
from mono.deployment import Deployment
from mono.interface import Carry, Layer
from mono.layers.checks import check_weights
from mono.layers.head import TYPE, Spec, Weights
from mono.parallel import Comm
from mono.reference.numerics import NATIVE, Numerics
from mono.reference.ops.rms_norm import absorb, gemma_rms_norm
from mono.reference.ops.top1 import top1
from mono.step import Step


def refuse(spec: Spec, deployment: Deployment) -> str | None:
    """The reference serves every head."""
    return None


def build(spec: Spec, weights: Weights, comm: Comm, numerics: Numerics = NATIVE) -> Layer:
    """Keep the weights as they are stored.

    Rounding: residual to bf16 (the last tap); norm output to bf16; logits stay fp32 up to the argmax.
    """
    check_weights(TYPE, spec, weights, comm)

    def head(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        total = absorb(carry, comm)  # [T, H] fp32
        x = gemma_rms_norm(total, weights.norm, spec.eps, numerics).bfloat16()  # of the unrounded sum
        logits = numerics.matmul(x.float(), weights.head.float())  # [T, V] fp32
        return replace(
            carry, residual=total.bfloat16(), partial=None, logits=logits, top1=top1(logits, spec.vocab)
        )

    return head
