"""Token embedding, in Triton."""

from __future__ import annotations

from dataclasses import replace

from mono.caches import LayerCache
from mono.deployment import Deployment
from mono.fast.ops import embed as ops
from mono.interface import Carry, Layer
from mono.layers.checks import check_weights
from mono.layers.embed import TYPE, Spec, Weights
from mono.parallel import Comm
from mono.step import Step


def refuse(spec: Spec, deployment: Deployment) -> str | None:
    """The fast arm serves every embedding."""
    return None


def build(spec: Spec, weights: Weights, comm: Comm) -> Layer:
    """Keep the table as it is stored. One launch; nothing is rounded, so the arms agree exactly."""
    check_weights(TYPE, spec, weights, comm)

    def embed(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        return replace(carry, partial=ops.embed(step.tokens, weights.table, spec.vocab))  # [T, H] bf16

    return embed
