"""Run a plan for one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mono.assembly import Assembly
from mono.caches import LayerCache
from mono.step import Step


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step of the target model yields.

    logits: [T, V] fp32, padded vocabulary columns included. top1: [T] int64.
    taps:   [T, m x H] bf16, the residual stream after each tapped decoder layer, side by side in the
            order of the ids; [T, 0] without taps.
    """

    logits: Tensor
    top1: Tensor
    taps: Tensor


def check_taps(taps: Sequence[int], layers: int) -> None:
    """ValueError unless tap ids increase strictly from -1 (the embedding) to the last layer."""
    if list(taps) != sorted(set(taps)) or any(not -1 <= t < layers for t in taps):
        raise ValueError(f"taps: expected strictly increasing ids from -1 to {layers - 1}, got {list(taps)}")


def run(assembly: Assembly, step: Step, caches: Sequence[LayerCache], taps: Sequence[int] = ()) -> StepOutput:
    """Run every slot of `assembly` on `step`; keys of its rows are written into `caches`.

    taps: decoder layer ids; a tap is the residual stream after that layer, with its output in it and
          before any norm, the last layer's included; -1 is the embedding's.
    """
    check_taps(taps, assembly.plan.layers)
    carry = assembly.start(step)
    streams: dict[int, Tensor] = {}
    for index, slot in enumerate(assembly.plan.slots):
        carry = assembly.run_slot(index, carry, step, caches)
        # an attention slot, or the head, first adds what the layer before it left
        if slot.kind in ("dense_attention", "sparse_attention", "head"):
            streams[slot.layer - 1] = carry.residual
    assert carry.logits is not None  # the plan ends in a head
    assert carry.top1 is not None
    tapped = [streams[t] for t in taps]
    together = torch.cat(tapped, dim=1) if tapped else carry.residual[:, :0]
    return StepOutput(carry.logits, carry.top1, together)
