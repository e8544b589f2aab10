"""What the logits of a mode amount to: flips by class, the margin's change against its noise, acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from audit.acceptance import StepAcceptance, Tally, tally
from audit.bounds import Clustered, Interval, clustered, interval, more_often
from audit.evidence import Evidence, Mode
from audit.floor import FACTOR, RowAt
from audit.margins import (
    FlipClass,
    Noise,
    Shift,
    classify,
    expected_flips,
    noise_of,
    robust_sigma,
    shift,
    size,
)
from audit.whole import Logits, RowFlip

Floats = NDArray[np.float64]

SHIFT_ERRORS = 4.0  # a mean change of the margin this many standard errors away is no chance
SHIFT_SIZE = 0.25  # and a bias below a quarter of the noise changes no token that the noise does not
FEWEST_BY_CHANCE = 1e-4  # p-value below which a count above the floor arms' is no chance


@dataclass(frozen=True, slots=True)
class JudgedLogits:
    """What one mode's logits amount to.

    tally:       acceptance against the reference. classes: the fast arm's flips by class;
                 agreement: two-sided interval of the share of rows without one.
    sigma, size: of the fast arm's margin changes, robust sigma and root mean square; noise: the floor arms'.
    expected:    flips the measured noise would cause. control_flips: flips of the floor arms, and their rows.
    divergent:   bound on steps with other emitted tokens, explained or not; unexplained: those whose
                 tokens differ by a T3 flip.
    kl:          median, 99th percentile and maximum divergence of the fast arm; kl_floor: the largest of the
                 floor arms'.
    """

    mode: Mode
    tally: Tally
    classes: dict[FlipClass, int]
    agreement: Interval
    flips: list[tuple[FlipClass, RowFlip]]
    sigma: float
    size: float
    shift: Shift
    noise: Noise
    expected: float
    control_flips: int
    control_rows: int
    control_divergent: int
    control_steps: int
    divergent: Clustered
    unexplained: Clustered
    kl: tuple[float, float, float]
    kl_floor: tuple[float, float, float]
    reasons: list[str]


def judge_logits(mode: Mode, seen: Logits, evidence: Evidence) -> JudgedLogits:
    """Flips, margins and acceptance of one mode."""
    floor_arms = [arm for arm in seen.steps if arm != "fast"]
    change, noise = seen.changes("fast"), noise_of([seen.changes(arm) for arm in floor_arms])
    flips = [(_class(flip, noise), flip) for flip in seen.flips.get("fast", [])]
    classes: dict[FlipClass, int] = {"T0": 0, "T1": 0, "T2": 0, "T3": 0}
    for kind, _ in flips:
        classes[kind] += 1
    steps, q = seen.steps["fast"], evidence.subject.deployment.q_len
    broken = {(flip.at.prompt, flip.at.position - flip.at.row % q) for kind, flip in flips if kind == "T3"}
    found = JudgedLogits(
        mode=mode,
        tally=tally([step for _, step in steps], evidence.subject.deployment.draft_len),
        classes=classes,
        agreement=interval(len(seen.gaps) - len(flips), len(seen.gaps)),
        flips=flips,
        sigma=robust_sigma(change[np.isfinite(change)]),
        size=size(change),
        shift=shift(change[np.isfinite(change)]),
        noise=noise,
        expected=expected_flips(seen.gaps, noise),
        control_flips=sum(len(seen.flips.get(arm, [])) for arm in floor_arms),
        control_rows=len(seen.gaps) * len(floor_arms),
        control_divergent=sum(not step.same_tokens for arm in floor_arms for _, step in seen.steps[arm]),
        control_steps=sum(len(seen.steps[arm]) for arm in floor_arms),
        divergent=_bound(steps, [not step.same_tokens for _, step in steps]),
        unexplained=_bound(
            steps, [not step.same_tokens and (at.prompt, at.position) in broken for at, step in steps]
        ),
        kl=_percentiles(seen.divergence("fast")),
        kl_floor=_largest([_percentiles(seen.divergence(arm)) for arm in floor_arms]),
        reasons=[],
    )
    found.reasons.extend(_logit_reasons(found, seen, len(change)))
    return found


def _logit_reasons(found: JudgedLogits, seen: Logits, rows: int) -> list[str]:
    mode, noise = found.mode, found.noise
    reasons = [f"{mode}: logits are not finite ({at})" for at in seen.not_finite[:1]]
    worst = [flip for kind, flip in found.flips if kind == "T3"]
    if worst:
        widest = max(worst, key=lambda flip: flip.gap)
        reasons.append(
            f"{mode}: {len(worst)} of {rows} rows flipped their top-1 at margins that no noise explains"
            f" (widest {widest.gap:.3g}, noise to {noise.limit:.3g}; {widest.at})"
        )
    if found.size > FACTOR * noise.size:
        reasons.append(
            f"{mode}: the margin changes by {found.size:.3g} (root mean square),"
            f" {found.size / noise.size:.3g} times what a row changes by under other orders of sums"
            f" (limit {FACTOR:g})"
            if noise.size > 0
            else f"{mode}: the margin changes by {found.size:.3g}, and under other orders of sums not at all"
        )
    biased = found.shift.sigmas > SHIFT_ERRORS and abs(found.shift.mean) > SHIFT_SIZE * noise.size
    if biased:
        reasons.append(
            f"{mode}: the margin is shifted by {found.shift.mean:.3g} on average,"
            f" {found.shift.sigmas:.3g} standard errors (limit {SHIFT_ERRORS:g}): a bias"
        )
    count, control = sum(found.classes.values()), found.control_flips
    if found.control_rows and more_often(count, rows, control, found.control_rows) < FEWEST_BY_CHANCE:
        reasons.append(
            f"{mode}: {count} of {rows} rows flipped, against {control} of {found.control_rows}"
            " on the floor arms"
        )
    return reasons


def _class(flip: RowFlip, noise: Noise) -> FlipClass:
    return classify(flip.gap, flip.ulp, noise)


def _bound(steps: Sequence[tuple[RowAt, StepAcceptance]], events: Sequence[bool]) -> Clustered:
    count: Counter[str] = Counter()
    trials: Counter[str] = Counter()
    for (at, _), event in zip(steps, events, strict=True):
        count[at.prompt] += event
        trials[at.prompt] += 1
    return clustered([count[prompt] for prompt in trials], list(trials.values()))


def _percentiles(kl: Floats) -> tuple[float, float, float]:
    if kl.size == 0 or not np.isfinite(kl).all():
        return (float("inf"),) * 3 if kl.size else (0.0, 0.0, 0.0)
    return float(np.median(kl)), float(np.quantile(kl, 0.99)), float(kl.max())


def _largest(rows: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    if not rows:
        return (0.0, 0.0, 0.0)
    return max(r[0] for r in rows), max(r[1] for r in rows), max(r[2] for r in rows)
