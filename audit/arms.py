"""The same plan on every arm of a run, and what one arm made of one slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from audit.steps import VerifyStep
from mono.assembly import Assembly, assemble
from mono.deployment import Deployment
from mono.interface import Carry
from mono.layers import AnyWeights
from mono.plan import Plan, Slot
from mono.reference.numerics import FLOAT64, NATIVE, Numerics, reordered
from mono.refusal import Refused


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
        """All arms beside a candidate. orders: numbers of interleaved parts of the floor's sums.

        Errors:  ValueError if the reference refuses the deployment.
        """

        def built(numerics: Numerics) -> Assembly:
            assembly = assemble(plan, weights, deployment, "reference", numerics=numerics)
            if isinstance(assembly, Refused):
                raise ValueError(f"reference: {assembly}")
            return assembly

        floor = {n.name: (built(n), n) for n in map(reordered, orders)}
        return Arms(weights, built(NATIVE), fast, built(FLOAT64), floor)

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
