"""The same plan on every arm of a run, and what one arm made of one slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from audit.steps import VerifyStep
from mono.assembly import Assembly, assemble
from mono.caches import LayerCache
from mono.deployment import Deployment
from mono.interface import Carry, Layer
from mono.layers import AnyWeights
from mono.plan import Plan, Slot
from mono.reference.numerics import FLOAT64, NATIVE, Numerics, reordered
from mono.refusal import Refused
from mono.step import Step

MOST_WORDS = 300  # characters of an error that a report quotes


class ArmError(Exception):
    """A slot of some arm raised. The message begins with the slot and fits on one line."""


def guarded(assembly: Assembly, arm: str) -> Assembly:
    """The same arm, with ArmError for whatever one of its slots raises.

    On a GPU the fast arm's errors surface later than the launch that made them, so each slot is waited for.
    """
    waits = arm == "fast" and assembly.device.type == "cuda"

    def guard(place: str, layer: Layer) -> Layer:
        def run(carry: Carry, step: Step, cache: LayerCache) -> Carry:
            try:
                after = layer(carry, step, cache)
                if waits:
                    torch.cuda.synchronize(assembly.device)
            except Exception as error:
                what = f"{type(error).__name__}: {' '.join(str(error).split())}"
                raise ArmError(
                    f"{place}: the {arm} arm raised {what[:MOST_WORDS]} (a step of {step.rows} rows)"
                ) from error
            return after

        return run

    slots = assembly.plan.slots
    layers = (guard(str(slot), layer) for slot, layer in zip(slots, assembly.layers, strict=True))
    return replace(assembly, layers=tuple(layers))


@dataclass(frozen=True, slots=True)
class Arms:
    """The same plan on every arm of a run.

    weights:  the checkpoint's, one for each slot; the oracle is run again on these where a choice is forced.
    fast:     the candidate.
    oracle:   the reference with float64 sums.
    floor:    by name, the reference with its sums in other legal orders. The reference itself is one too.
    """

    weights: Sequence[AnyWeights]
    reference: Assembly
    fast: Assembly
    oracle: Assembly
    floor: Mapping[str, tuple[Assembly, Numerics]]

    @staticmethod
    def of(
        plan: Plan,
        weights: Sequence[AnyWeights],
        deployment: Deployment,
        fast: Assembly,
        orders: Sequence[int] = (2, 3),
    ) -> Arms:
        """All arms beside a candidate, guarded. orders: numbers of interleaved parts of the floor's sums.

        Errors:  ValueError if the reference refuses the deployment.
        """

        def built(numerics: Numerics) -> Assembly:
            assembly = assemble(plan, weights, deployment, "reference", numerics=numerics)
            if isinstance(assembly, Refused):
                raise ValueError(f"reference: {assembly}")
            return assembly

        return Arms(
            weights,
            guarded(built(NATIVE), "reference"),
            guarded(fast, "fast"),
            guarded(built(FLOAT64), "oracle"),
            {n.name: (guarded(built(n), n.name), n) for n in map(reordered, orders)},
        )

    @property
    def floor_arms(self) -> tuple[str, ...]:
        """Names of the arms whose error is the floor."""
        return (*self.floor, "reference")

    def by_name(self) -> dict[str, tuple[Assembly, Numerics | None]]:
        """Every arm and how it sums, the reference last: what it writes is what stays."""
        return {
            "oracle": (self.oracle, FLOAT64),
            **self.floor,
            "fast": (self.fast, None),
            "reference": (self.reference, NATIVE),
        }


@dataclass(frozen=True, slots=True)
class At:
    """One slot of one step, and the reference's carry before it."""

    index: int
    slot: Slot
    layer: int
    carry: Carry
    step: VerifyStep


@dataclass(frozen=True, slots=True)
class Run:
    """What one arm made of one slot.

    written:  the step's rows of the cache. scores: what a choice was made by; None on the fast arm.
    """

    carry: Carry
    written: Mapping[str, Tensor]
    scores: Tensor | None
