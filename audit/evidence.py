"""Gathering evidence: every prompt's verify steps through every mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from audit.arms import ArmError, Arms
from audit.floor import EVENT_RATE_WHOLE, Ledger, RowAt
from audit.steps import Prompt, Schedule, Session, VerifyStep
from audit.walk import Blemish, walk_slots
from audit.whole import (
    Candidate,
    Drafts,
    Forced,
    Logits,
    accepted_rows,
    record_taps,
    shadow,
    whole_floor,
)
from audit.written import poisoned
from mono.deployment import Deployment
from mono.dspark.drafter import Proposer
from mono.layers import AnyWeights, head, moe
from mono.plan import Plan

Mode = Literal["local", "shadow", "forced"]
MODES: tuple[Mode, ...] = ("local", "shadow", "forced")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is audited: a model, how it is deployed, and what drafts for it.

    name: for the report. stop: tokens that end a text.
    """

    name: str
    plan: Plan
    weights: Sequence[AnyWeights]
    deployment: Deployment
    proposer: Proposer
    stop: frozenset[int]

    @property
    def vocab(self) -> int:
        """True tokens."""
        spec = self.plan.slots[-1].spec
        assert isinstance(spec, head.Spec)  # a plan ends in a head
        return spec.vocab


@dataclass(slots=True)
class Evidence:
    """Everything a run saw. A verdict is a function of this and of nothing else.

    local, whole:   row errors by slot, and of taps and caches. blemishes: with the place of each.
    shadow, forced: logits and acceptance. drafts: blocks of each arm's own drafter.
    widths:         verify steps by the width they ran at.
    prompts:        verify steps by prompt.
    accepted:       verify steps by the reference's accepted length.
    rejected_then:  steps whose predecessor rejected a draft: the only ones that can show a kept key.
    raised:         what an arm's slot raised; the run ended there.
    rows, rows_selecting:  rows that are no padding, and those with more keys than a selection keeps.
    """

    subject: Subject
    fast_slots: tuple[str, ...]
    reference_slots: tuple[str, ...]
    modes: tuple[Mode, ...]
    local: Ledger
    whole: Ledger
    shadow: Logits = field(default_factory=Logits)
    forced: Logits = field(default_factory=Logits)
    drafts: Drafts = field(default_factory=Drafts)
    blemishes: list[tuple[str, str, RowAt | None]] = field(default_factory=list)
    widths: Counter[int] = field(default_factory=Counter)
    prompts: Counter[str] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    rejected_then: int = 0
    rows: int = 0
    rows_selecting: int = 0
    longest: int = 0
    raised: str | None = None

    @property
    def logits(self) -> tuple[tuple[Mode, Logits], ...]:
        """The modes that compare logits, and what they saw."""
        return ("shadow", self.shadow), ("forced", self.forced)

    @property
    def steps(self) -> int:
        """Verify steps: one request's verify is one."""
        return sum(self.prompts.values())

    @property
    def experts_missed(self) -> dict[str, int]:
        """Experts of each audited MoE slot that no row chose."""
        missed = {}
        for slot in self.subject.plan.slots:
            if isinstance(slot.spec, moe.Spec) and str(slot) in self.local.places:
                chosen = self.local.expert_rows(str(slot))
                missed[str(slot)] = slot.spec.experts - len(chosen)
        return {place: count for place, count in missed.items() if count}


OnStep = Callable[[int, int], None]


def gather(
    subject: Subject,
    candidate: Candidate,
    prompts: Sequence[Prompt],
    schedule: Schedule,
    modes: Sequence[Mode] = MODES,
    seed: int = 0,
    on_step: OnStep = lambda done, wanted: None,
) -> Evidence:
    """Decode `prompts` on the reference and hold every arm against it, until enough verify steps are seen.

    An arm that raises ends the run, and is evidence like any other.

    on_step: is told the number of verify steps done and wanted.
    """
    deployment, plan = subject.deployment, subject.plan
    arms = Arms.of(plan, subject.weights, deployment, candidate.assembly)
    names = [str(slot) for slot in plan.slots]
    sides = candidate.assembly.sides
    evidence = Evidence(
        subject=subject,
        fast_slots=tuple(n for n, side in zip(names, sides, strict=True) if side == "fast"),
        reference_slots=tuple(n for n, side in zip(names, sides, strict=True) if side == "reference"),
        modes=tuple(mode for mode in MODES if mode in modes),
        local=Ledger(arms.floor_arms),
        whole=Ledger(whole_floor(arms), EVENT_RATE_WHOLE),
    )
    try:
        _audit(evidence, arms, candidate, prompts, schedule, seed, on_step)
    except ArmError as error:
        evidence.raised = str(error)
    return evidence


def _audit(
    evidence: Evidence,
    arms: Arms,
    candidate: Candidate,
    prompts: Sequence[Prompt],
    schedule: Schedule,
    seed: int,
    on_step: OnStep,
) -> None:
    subject, deployment = evidence.subject, evidence.subject.deployment
    start, every_width = 0, sum(width // deployment.q_len for width in deployment.widths)
    while start < len(prompts) and evidence.steps < schedule.steps:
        missing = -(-(schedule.steps - evidence.steps) // schedule.rounds)
        count = min(max(missing, every_width), max(schedule.together, every_width))
        some = list(enumerate(prompts))[start : start + count]
        session = Session(
            arms.reference,
            subject.proposer,
            some,
            deployment.widths,
            deployment.max_context,
            subject.stop,
            seed + start,
            schedule.prefill_rows,
        )
        start += len(some)
        depths = schedule.depths
        session.advance({number: depths[number % len(depths)] for number, _ in some})
        _audit_session(evidence, arms, candidate, session, prompts, schedule, on_step)


def _audit_session(
    evidence: Evidence,
    arms: Arms,
    candidate: Candidate,
    session: Session,
    prompts: Sequence[Prompt],
    schedule: Schedule,
    on_step: OnStep,
) -> None:
    modes, plan, vocab = evidence.modes, evidence.subject.plan, evidence.subject.vocab
    names = [str(slot) for slot in plan.slots]
    history, taps = session.history, session.history.taps
    scratch = [cache.clone() for cache in history.caches]
    forced = Forced(arms, candidate, session) if "forced" in modes else None
    rejected: set[int] = set()  # prompts whose last step rejected a draft
    for _ in range(schedule.rounds):
        step = session.next(session.requests[: schedule.steps - evidence.steps])
        if step is None:
            return
        at = rows_of(step, prompts)
        poisoned(history.caches, step.step)
        whole = shadow(arms, candidate, step, history.caches, scratch, taps) if "shadow" in modes else None
        if "local" in modes:
            local = walk_slots(arms, step, history.caches, scratch, taps)
            output = local.output
            for seen in local.comparisons:
                evidence.local.add(
                    names[seen.slot],
                    seen.output,
                    seen.errors,
                    seen.event,
                    at,
                    seen.behind,
                    seen.gap,
                    seen.noise,
                    seen.experts,
                    seen.unequal,
                    seen.ulps,
                )
            evidence.blemishes += [_placed(names, blemish, at) for blemish in local.blemishes]
        else:
            output = history.run(step)
        own = forced.run(step) if forced is not None else None
        committed = session.commit(
            step, output, [(forced.histories[a], own[a]) for a in own] if forced and own else ()
        )
        rows = accepted_rows(step, committed)
        if whole is not None:
            evidence.shadow.add(step, at, vocab, output, whole)
            record_taps(evidence.whole, plan, "shadow", taps, rows, at, output, whole)
        if forced is not None and own is not None:
            evidence.forced.add(step, at, vocab, output, own)
            forced.record_caches(evidence.whole, plan, rows, at, step, history.caches)
            record_taps(evidence.whole, plan, "forced", taps, rows, at, output, own)
            moved = {place.prompt for place in step.places}
            going = [request for request in session.requests if request.prompt in moved]
            evidence.drafts.add([request.drafts for request in going], forced.draft(going))
        _count(evidence, step, committed.accepted, prompts, rejected)
        on_step(evidence.steps, schedule.steps)


def _count(
    evidence: Evidence,
    step: VerifyStep,
    accepted: Sequence[int],
    prompts: Sequence[Prompt],
    rejected: set[int],
) -> None:
    keys = evidence.subject.plan.keys_before_selection
    evidence.rows += step.rows
    evidence.rows_selecting += int((step.step.visible > keys).sum())
    evidence.longest = max(evidence.longest, int(step.step.visible.max()))
    for part in step.parts:
        evidence.widths[part.step.rows] += part.rows // step.step.q_len
    for place, count in zip(step.places, accepted, strict=True):
        evidence.prompts[prompts[place.prompt].name] += 1
        evidence.accepted[count] += 1
        evidence.rejected_then += place.prompt in rejected
        if count < len(place.drafts):
            rejected.add(place.prompt)
        else:
            rejected.discard(place.prompt)


def rows_of(step: VerifyStep, prompts: Sequence[Prompt]) -> list[RowAt]:
    """Where each row of a step comes from, and its place in the part that the fast arm ran."""
    q = step.step.q_len
    found = []
    for part in step.parts:
        for row in range(part.start, part.stop):
            place = step.places[row // q]
            at = place.position + row % q
            found.append(RowAt(prompts[place.prompt].name, at, row - part.start, part.step.rows))
    return found


def _placed(names: Sequence[str], blemish: Blemish, at: Sequence[RowAt]) -> tuple[str, str, RowAt | None]:
    return names[blemish.slot], blemish.what, None if blemish.row is None else at[blemish.row]
