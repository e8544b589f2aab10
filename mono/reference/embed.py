"""Token embedding, in PyTorch."""

from __future__ import annotations

from dataclasses import replace

from mono.caches import LayerCache
from mono.deployment import Deployment
from mono.interface import Carry, Layer
from mono.layers.checks import check_weights
from mono.layers.embed import TYPE, Spec, Weights
from mono.parallel import Comm
from mono.reference.numerics import NATIVE, Numerics
from mono.step import Step


def refuse(spec: Spec, deployment: Deployment) -> str | None:
    """The reference serves every embedding."""
    return None


def build(spec: Spec, weights: Weights, comm: Comm, numerics: Numerics = NATIVE) -> Layer:
    """Rows of the table become the first `partial`; the residual stream starts at zero.

    Padding rows may carry any token id; they are looked up as token 0.
    """
    check_weights(TYPE, spec, weights, comm)

    def embed(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        tokens = step.tokens.clamp(0, spec.vocab - 1)
        return replace(carry, partial=weights.table[tokens])  # [T, H] bf16

    return embed
