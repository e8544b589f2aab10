"""Does a difference of top-1 reach the user? Acceptance of both arms on one verify step, at three levels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from mono.dspark.acceptance import accept_greedy

Place = Literal["before", "decisive", "after"]


@dataclass(frozen=True, slots=True)
class Flip:
    """A row whose top-1 differs between the arms.

    row:    row of the request, 0 to draft_len.
    place:  where it lies against the reference's accepted length A: `before` (row < A: shortens),
            `decisive` (row = A: changes the bonus token, and lengthens if the new token is the next draft),
            `after` (row > A: conditioned on a rejected token and discarded).
    """

    row: int
    place: Place


@dataclass(frozen=True, slots=True)
class StepAcceptance:
    """One request's verify step on both arms.

    accepted:          leading drafts that equal the reference's top-1.
    accepted_other:    the same on the other arm.
    emitted, emitted_other:  accepted drafts, then the bonus token.
    flips:             rows whose top-1 differs.
    """

    accepted: int
    accepted_other: int
    emitted: tuple[int, ...]
    emitted_other: tuple[int, ...]
    flips: tuple[Flip, ...]

    @property
    def same_length(self) -> bool:
        """L0: as many drafts accepted. The text may still differ, by its bonus token."""
        return self.accepted == self.accepted_other

    @property
    def same_tokens(self) -> bool:
        """L1: the same tokens emitted, bonus included: what the user sees."""
        return self.emitted == self.emitted_other

    @property
    def same_top1(self) -> bool:
        """L2: the same top-1 on every row, those that cannot matter included."""
        return not self.flips

    @property
    def decisive_rows(self) -> int:
        """Rows that can change what is emitted: 0 to A."""
        return self.accepted + 1


def accept(drafts: Sequence[int], top1: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Accepted length and emitted tokens of one request, by the rule that serving uses (`accept_greedy`)."""
    if len(top1) != len(drafts) + 1:
        raise ValueError(f"accept: expected one top-1 more than drafts, got {len(top1)} and {len(drafts)}")
    found = accept_greedy(torch.tensor([list(drafts)]), torch.tensor([list(top1)]))
    accepted = int(found.accepted[0])
    return accepted, tuple(found.emitted[0, : accepted + 1].tolist())


def compare_acceptance(
    drafts: Sequence[int], reference_top1: Sequence[int], other_top1: Sequence[int]
) -> StepAcceptance:
    """Both arms on the same drafts."""
    accepted, emitted = accept(drafts, reference_top1)
    accepted_other, emitted_other = accept(drafts, other_top1)
    flips = tuple(
        Flip(row, place_of(row, accepted))
        for row, (a, b) in enumerate(zip(reference_top1, other_top1, strict=True))
        if a != b
    )
    return StepAcceptance(accepted, accepted_other, emitted, emitted_other, flips)


def place_of(row: int, accepted: int) -> Place:
    """Which class of section "flips" a row belongs to."""
    return "before" if row < accepted else "decisive" if row == accepted else "after"


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts over many verify steps."""

    steps: int
    rows: int
    decisive_rows: int
    length_differs: int
    tokens_differ: int
    top1_differs: int
    flips: dict[Place, int]
    accepted: dict[int, int]

    @property
    def accepted_mean(self) -> float:
        """Mean accepted drafts of the reference, the bonus not counted."""
        return sum(a * n for a, n in self.accepted.items()) / max(self.steps, 1)


def tally(steps: Iterable[StepAcceptance], draft_len: int) -> Tally:
    """Count steps that differ at each level, and flips by place."""
    steps = list(steps)
    flips: dict[Place, int] = {"before": 0, "decisive": 0, "after": 0}
    for step in steps:
        for flip in step.flips:
            flips[flip.place] += 1
    return Tally(
        steps=len(steps),
        rows=len(steps) * (draft_len + 1),
        decisive_rows=sum(step.decisive_rows for step in steps),
        length_differs=sum(not step.same_length for step in steps),
        tokens_differ=sum(not step.same_tokens for step in steps),
        top1_differs=sum(not step.same_top1 for step in steps),
        flips=flips,
        accepted={a: sum(step.accepted == a for step in steps) for a in range(draft_len + 1)},
    )
