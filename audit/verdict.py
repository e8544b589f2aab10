"""From evidence to a verdict. The exit code is the verdict, and nothing else is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from audit.bounds import more_often, steps_needed
from audit.evidence import MODES, Evidence
from audit.floor import Judged, RowAt
from audit.logits import FEWEST_BY_CHANCE, JudgedLogits, judge_logits


class Outcome(IntEnum):
    """What a run ends in; the value is the exit code."""

    PASS = 0
    FAIL = 1
    INCONCLUSIVE = 2
    UNUSABLE = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a run.

    reasons:    why it fails, or why it is inconclusive; the place comes first in each.
    slots:      every output of every slot against its floor; whole: taps and caches of whole steps.
    logits:     by mode. not_tested: what this run could not see, in words.
    needed:     clean steps that the budget asks for.
    """

    outcome: Outcome
    reasons: list[str]
    slots: list[Judged]
    whole: list[Judged]
    logits: list[JudgedLogits]
    not_tested: list[str]
    budget: float
    needed: int


def judge(evidence: Evidence, budget: float) -> Verdict:
    """Apply every rule.

    budget: largest acceptable rate of verify steps with other emitted tokens that no near tie explains.
    Errors: ValueError unless 0 < budget < 1.
    """
    needed = steps_needed(budget)
    slots, whole = evidence.local.judged(), evidence.whole.judged()
    logits = [judge_logits(mode, seen, evidence) for mode, seen in evidence.logits if seen.steps.get("fast")]
    reasons = [] if evidence.raised is None else [evidence.raised]
    reasons += [f"{place}: {what}{f' ({at})' if at else ''}" for place, what, at in _first(evidence)]
    reasons += [why for found in (*slots, *whole) for why in found.reasons]
    reasons += [why for found in logits for why in found.reasons]
    reasons += _drafts(evidence)
    if evidence.raised is None:  # a run that broke off saw little, and is no pass anyway
        reasons += _blind(evidence)
    outcome = Outcome.FAIL if reasons else Outcome.PASS
    if outcome is Outcome.PASS:
        reasons = _weak(evidence, logits, budget, needed)
        outcome = Outcome.INCONCLUSIVE if reasons else Outcome.PASS
    return Verdict(outcome, reasons, slots, whole, logits, _not_tested(evidence), budget, needed)


def _first(evidence: Evidence) -> list[tuple[str, str, RowAt | None]]:
    """The first blemish of each kind at each place: a broken arm has one for every step."""
    seen: dict[tuple[str, str], tuple[str, str, RowAt | None]] = {}
    for place, what, at in evidence.blemishes:
        seen.setdefault((place, what), (place, what, at))
    return list(seen.values())


def _drafts(evidence: Evidence) -> list[str]:
    blocks, differ = evidence.drafts.blocks, evidence.drafts.differ
    floor = {arm: count for arm, count in differ.items() if arm != "fast"}
    if not blocks or not floor:
        return []
    control = sum(floor.values())
    if more_often(differ["fast"], blocks, control, blocks * len(floor)) >= FEWEST_BY_CHANCE:
        return []
    return [
        f"forced: {differ['fast']} of {blocks} draft blocks differ from the reference's, against {control} of"
        f" {blocks * len(floor)} on the floor arms"
    ]


def _blind(evidence: Evidence) -> list[str]:
    """What makes a would-be pass worth nothing."""
    if evidence.steps == 0 or evidence.rows == 0:
        return ["nothing was compared: no verify step ran"]
    reasons = []
    if not evidence.fast_slots:
        reasons.append("nothing was compared: no slot runs on the fast arm")
    if "local" in evidence.modes:
        reasons += [
            f"{slot}: not visited" for slot in evidence.fast_slots if slot not in evidence.local.places
        ]
    deployment, plan = evidence.subject.deployment, evidence.subject.plan
    reasons += [
        f"width {width}: not visited"
        for width in deployment.widths
        if width >= deployment.q_len and width not in evidence.widths
    ]
    if plan.selecting and not evidence.rows_selecting:
        reasons.append(
            f"inputs cannot show a selection fault: no context has more than the {plan.keys_before_selection}"
            f" keys that a selection keeps (longest {evidence.longest})"
        )
    if "forced" in evidence.modes and not evidence.rejected_then:
        reasons.append("inputs cannot show a kept key: no step followed one that rejected a draft")
    if not any(evidence.accepted[count] for count in evidence.accepted if count > 0):
        reasons.append("inputs cannot show a shortened text: no draft was ever accepted")
    return reasons


def _weak(evidence: Evidence, logits: list[JudgedLogits], budget: float, needed: int) -> list[str]:
    """Why a clean run does not carry the budget."""
    missing = [mode for mode in MODES if mode not in evidence.modes]
    reasons = [f"mode {mode} was not run" for mode in missing]
    if not logits:
        return [*reasons, "no mode that compares emitted tokens was run"]
    bound = logits[0].unexplained
    if bound.upper_effective > budget:
        reasons.append(
            f"{bound.trials} verify steps leave up to {bound.upper_effective:.2%} of steps with other tokens;"
            f" the budget of {budget:.2%} takes {needed} clean steps"
        )
    return reasons


def _not_tested(evidence: Evidence) -> list[str]:
    deployment = evidence.subject.deployment
    found = []
    if evidence.reference_slots:
        slots = evidence.reference_slots
        found.append(
            f"{len(slots)} slots stay on the reference arm ({slots[0]} to {slots[-1]}): nothing to compare"
        )
    found += [f"mode {mode}" for mode in MODES if mode not in evidence.modes]
    for place, count in evidence.experts_missed.items():
        found.append(f"{place}: experts that no row chose: {count}")
    lengths = [a for a in range(deployment.draft_len + 1) if not evidence.accepted[a]]
    if lengths:
        found.append(f"accepted lengths {', '.join(map(str, lengths))}: no such step")
    if evidence.longest < deployment.max_context:
        found.append(f"contexts beyond {evidence.longest} of {deployment.max_context} tokens")
    found += ["free-running text and task accuracy", "sampling above temperature 0", "captured graphs"]
    if deployment.tp_size > 1:
        found.append(f"ranks other than this one of {deployment.tp_size}")
    return found
