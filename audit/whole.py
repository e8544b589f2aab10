"""Whole steps: from the reference's history (shadow), and on caches and taps of each arm's own (forced)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from audit.acceptance import Place, StepAcceptance, compare_acceptance, place_of
from audit.arms import Arms
from audit.floor import Ledger, RowAt
from audit.margins import margin_change, margins
from audit.measures import finite_rows, kl_divergence, least_error, row_error
from audit.steps import Committed, History, Request, Session, VerifyStep, run_in_parts
from audit.written import MANTISSA, cache_rows, head_error, head_least
from mono.assembly import Assembly
from mono.caches import LayerCache
from mono.decode import StepOutput, run
from mono.layers import moe, sparse_attention
from mono.plan import Plan

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidate:
    """The arm under audit, and what of its surroundings may differ.

    taps:     decoder layers it taps, in place of the drafter's own. history: how its own past behaves.
    """

    assembly: Assembly
    taps: tuple[int, ...] | None = None
    history: type[History] = History


@dataclass(frozen=True, slots=True)
class RowFlip:
    """A row whose top-1 differs from the reference's.

    gap: the reference's logit of its own top-1 minus that of the other arm's. ulp: one step of the larger.
    """

    at: RowAt
    place: Place
    gap: float
    ulp: float


@dataclass(slots=True)
class Logits:
    """What a mode saw of the logits, over all its rows and by arm; floor arms and the fast one.

    gap:         the reference's margin.
    change, kl:  change of the margin, and divergence from the reference's distribution in nats.
    steps:       acceptance of each request's step, with its anchor's row. flips: the rows that differ.
    not_finite:  places where the fast arm's logits, or the reference's, are not finite.
    """

    gap: list[Floats] = field(default_factory=list)
    change: dict[str, list[Floats]] = field(default_factory=dict)
    kl: dict[str, list[Floats]] = field(default_factory=dict)
    steps: dict[str, list[tuple[RowAt, StepAcceptance]]] = field(default_factory=dict)
    flips: dict[str, list[RowFlip]] = field(default_factory=dict)
    not_finite: list[RowAt] = field(default_factory=list)

    def changes(self, arm: str) -> Floats:
        """Change of the margin of every row on one arm."""
        return np.concatenate(self.change[arm]) if self.change.get(arm) else np.zeros(0)

    def divergence(self, arm: str) -> Floats:
        """Divergence of every row on one arm."""
        return np.concatenate(self.kl[arm]) if self.kl.get(arm) else np.zeros(0)

    @property
    def gaps(self) -> Floats:
        """The reference's margin of every row."""
        return np.concatenate(self.gap) if self.gap else np.zeros(0)

    def add(
        self,
        step: VerifyStep,
        at: Sequence[RowAt],
        vocab: int,
        reference: StepOutput,
        others: Mapping[str, StepOutput],
    ) -> None:
        """Compare the logits of every arm with the reference's on one step."""
        rows, q = step.rows, step.step.q_len
        found = margins(reference.logits[:rows], vocab)
        self.gap.append(found.gap.cpu().numpy())
        own = reference.top1[:rows].tolist()
        ulp = found.ulp.tolist()
        for arm, output in others.items():
            logits = output.logits[:rows]
            self.change.setdefault(arm, []).append(margin_change(logits, found).cpu().numpy())
            self.kl.setdefault(arm, []).append(
                kl_divergence(logits[:, :vocab], reference.logits[:rows, :vocab]).cpu().numpy()
            )
            theirs = output.top1[:rows].tolist()
            for r, place in enumerate(step.places):
                of = slice(r * q, (r + 1) * q)
                acceptance = compare_acceptance(place.drafts, own[of], theirs[of])
                self.steps.setdefault(arm, []).append((at[r * q], acceptance))
                for flip in acceptance.flips:
                    row = r * q + flip.row
                    self.flips.setdefault(arm, []).append(
                        RowFlip(
                            at[row],
                            place_of(flip.row, acceptance.accepted),
                            float(reference.logits[row, own[row]] - reference.logits[row, theirs[row]]),
                            ulp[row],
                        )
                    )
        finite = finite_rows(others["fast"].logits[:rows]) & finite_rows(reference.logits[:rows])
        self.not_finite += [at[row] for row in torch.nonzero(~finite)[:, 0].tolist()]


def shadow(
    arms: Arms,
    candidate: Candidate,
    step: VerifyStep,
    before: Sequence[LayerCache],
    scratch: Sequence[LayerCache],
    taps: tuple[int, ...],
) -> dict[str, StepOutput]:
    """The whole step on every arm but the reference, from the reference's caches `before` it."""
    outputs = {}
    floor = {"oracle": arms.oracle, **{name: assembly for name, (assembly, _) in arms.floor.items()}}
    for name, assembly in {**floor, "fast": arms.fast}.items():
        for own, theirs in zip(scratch, before, strict=True):
            own.copy_(theirs)
        if name == "fast":
            outputs[name] = run_in_parts(assembly, step, scratch, candidate.taps or taps)
        else:
            outputs[name] = run(assembly, step.step, scratch, taps)
    return outputs


def whole_floor(arms: Arms) -> tuple[str, ...]:
    """Floor arms of whole-step comparisons, where the yardstick is the reference itself."""
    return ("oracle", *arms.floor)


def event_upstream(plan: Plan, layers: int) -> float:
    """What one near tie in the first `layers` decoder layers may cost a row behind them.

    Legal orders of sums decide near ties otherwise, now and then. A swapped expert is the last of K, with at
    most 1/K of the routed weight, in a slot whose output is at most half of the stream: 1 / (2 K). Where no
    expert is chosen, a re-rounded row of activations: 2^-5 (`walk`). 0 where nothing comes before.
    """
    before = [slot.spec for slot in plan.slots if 0 <= slot.layer < layers]
    if not before:
        return 0.0
    return max([2.0**-5, *(0.5 / spec.topk for spec in before if isinstance(spec, moe.Spec))])


def choice_upstream(plan: Plan, layers: int) -> bool:
    """Whether any of the first `layers` decoder layers picks experts or KV blocks."""
    before = [slot.spec for slot in plan.slots if 0 <= slot.layer < layers]
    return any(
        isinstance(s, moe.Spec) or (isinstance(s, sparse_attention.Spec) and s.selects) for s in before
    )


def record_taps(
    ledger: Ledger,
    plan: Plan,
    place: str,
    taps: tuple[int, ...],
    rows: Sequence[int],
    at: Sequence[RowAt],
    reference: StepOutput,
    others: Mapping[str, StepOutput],
) -> None:
    """Compare each tap of the rows that the drafter will read, 0 to A of each request."""
    width = reference.taps.shape[1] // len(taps)
    for band, tap in enumerate(taps):
        of = slice(band * width, (band + 1) * width)
        want = reference.taps[list(rows), of]
        ledger.add(
            f"{place}: tap after layer {tap}",
            "tap",
            {arm: row_error(output.taps[list(rows), of], want) for arm, output in others.items()},
            least_error(want, 7).clamp(min=event_upstream(plan, tap + 1)),  # a tap is bf16
            [at[row] for row in rows],
            tied=choice_upstream(plan, tap + 1),
        )


@dataclass(slots=True)
class Drafts:
    """Blocks that each arm's own drafter proposed after its own taps, and those unlike the reference's."""

    blocks: int = 0
    differ: dict[str, int] = field(default_factory=dict)

    def add(
        self, reference: Sequence[tuple[int, ...]], others: Mapping[str, Sequence[tuple[int, ...]]]
    ) -> None:
        """Count the blocks of one round."""
        self.blocks += len(reference)
        for arm, blocks in others.items():
            unlike = sum(a != b for a, b in zip(reference, blocks, strict=True))
            self.differ[arm] = self.differ.get(arm, 0) + unlike


class Forced:
    """Arms that follow the reference's tokens on caches, taps and draft contexts of their own."""

    def __init__(self, arms: Arms, candidate: Candidate, session: Session) -> None:
        """Fork every arm's past from the session's, as it stands."""
        past = session.history
        self.histories = {name: past.fork(assembly) for name, (assembly, _) in arms.floor.items()}
        self.histories["oracle"] = past.fork(arms.oracle)
        self.histories["fast"] = past.fork(arms.fast, candidate.taps, candidate.history, in_parts=True)

    def run(self, step: VerifyStep) -> dict[str, StepOutput]:
        """The step on every arm, each on its own past."""
        return {name: history.run(step) for name, history in self.histories.items()}

    def record_caches(
        self,
        ledger: Ledger,
        plan: Plan,
        rows: Sequence[int],
        at: Sequence[RowAt],
        step: VerifyStep,
        reference: Sequence[LayerCache],
    ) -> None:
        """Compare the cache slots of the accepted rows after the step: what later steps will read."""
        slots = step.step.slots[list(rows)]
        for layer, cache in enumerate(reference):
            name = plan.slots[1 + 2 * layer]
            want = cache_rows(cache, slots)
            got = {arm: cache_rows(history.caches[layer], slots) for arm, history in self.histories.items()}
            for output, values in want.items():
                errors = {arm: head_error(found[output], values) for arm, found in got.items()}
                event = head_least(values, MANTISSA[cache.k.dtype]).clamp(min=event_upstream(plan, layer))
                ledger.add(
                    f"{name}: own cache",
                    output,
                    errors,
                    event,
                    [at[row] for row in rows],
                    tied=choice_upstream(plan, layer),
                )

    def draft(self, requests: Sequence[Request]) -> dict[str, list[tuple[int, ...]]]:
        """Each arm's drafts for the next step; they are compared, never verified."""
        return {name: history.propose(requests) for name, history in self.histories.items()}


def accepted_rows(step: VerifyStep, committed: Committed) -> list[int]:
    """Rows 0 to A of every request, by their place in the step."""
    q = step.step.q_len
    return [r * q + j for r, a in enumerate(committed.accepted) for j in range(a + 1)]
