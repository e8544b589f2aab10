"""A plan with every slot built on one arm or the other: what the audit walks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mono import reference
from mono.caches import LayerCache
from mono.deployment import Deployment
from mono.interface import Carry, Layer, Side
from mono.layers import AnyWeights, embed
from mono.parallel import SOLO, Comm
from mono.plan import Plan, Slot
from mono.reference.numerics import NATIVE, Numerics
from mono.refusal import Refused
from mono.step import Step


@dataclass(frozen=True, slots=True)
class Assembly:
    """Built layers of every slot of a plan, which arm each one is, and what they serve."""

    plan: Plan
    layers: tuple[Layer, ...]
    sides: tuple[Side, ...]
    device: torch.device
    deployment: Deployment

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.plan.slots[0].spec.hidden

    def start(self, step: Step) -> Carry:
        """The carry before the first slot of a step."""
        return Carry.start(step.rows, self.hidden, self.device)

    def run_slot(self, index: int, carry: Carry, step: Step, caches: Sequence[LayerCache]) -> Carry:
        """Run slot number `index` alone on a carry. A ValueError names the slot."""
        slot = self.plan.slots[index]
        layer = min(max(slot.layer, 0), self.plan.layers - 1)
        try:
            return self.layers[index](carry, step, caches[layer])
        except ValueError as error:
            raise ValueError(f"{slot}: {error}") from error


def assemble(
    plan: Plan,
    weights: Sequence[AnyWeights],
    deployment: Deployment,
    side: Side,
    comm: Comm = SOLO,
    numerics: Numerics = NATIVE,
) -> Assembly | Refused:
    """Build every slot of `plan` on one arm, or say which slots that arm refuses and why.

    side:      `fast` runs a sparse dense-MLP prefix on the reference arm unless `deployment.prefix` is
               `fast`; every other slot is fast.
    numerics:  how the reference sums; native wherever the model is served.
    Errors:    ValueError if the weights are not one for each slot, or their RoPE table ends before
               `deployment.max_context`.
    """
    if len(weights) != len(plan.slots):
        raise ValueError(f"assemble: {len(plan.slots)} slots, {len(weights)} weights")
    for slot, slot_weights in zip(plan.slots, weights, strict=True):
        rope = getattr(slot_weights, "rope", None)
        if rope is not None and rope.shape[0] < deployment.max_context:
            raise ValueError(
                f"{slot}: rope: expected deployment.max_context = {deployment.max_context} positions,"
                f" got {rope.shape[0]}"
            )
    if deployment.tp_size != comm.size:
        return Refused((f"tp_size is {deployment.tp_size}, the group has {comm.size} rank",))
    sides = tuple(side_of(plan, slot, deployment, side) for slot in plan.slots)
    reasons = [
        f"{slot}: {why}"
        for slot, at in zip(plan.slots, sides, strict=True)
        if (why := _arm(slot, at).refuse(slot.spec, deployment)) is not None
    ]
    if reasons:
        return Refused(tuple(reasons))
    layers = []
    for slot, at, slot_weights in zip(plan.slots, sides, weights, strict=True):
        extra = {"numerics": numerics} if at == "reference" else {}
        try:
            layers.append(_arm(slot, at).build(slot.spec, slot_weights, comm, **extra))
        except ValueError as error:
            raise ValueError(f"{slot}: {error}") from error
    first = weights[0]
    assert isinstance(first, embed.Weights)  # a plan begins with the embedding
    return Assembly(plan, tuple(layers), sides, first.table.device, deployment)


def side_of(plan: Plan, slot: Slot, deployment: Deployment, side: Side) -> Side:
    """The arm that serves `slot` when the model is asked to run on `side`."""
    sparse_prefix = plan.slots[1].kind == "sparse_attention"
    in_prefix = 0 <= slot.layer < plan.prefix < plan.layers
    if side == "fast" and sparse_prefix and in_prefix and deployment.prefix == "reference":
        return "reference"
    return side


def _arm(slot: Slot, side: Side) -> Any:
    if side == "reference":
        return reference.ARMS[slot.kind]
    from mono import fast  # Triton is imported only where a fast arm is asked for

    return fast.ARMS[slot.kind]
