"""Is an error normal? The fast arm's errors against those that legal orders of sums show on the same rows.

The floor of an output is the largest error of any recorded row on any floor arm: the reference and its
reordered forms, against the float64 oracle. Rounding hides most reorderings: on most rows the floor arms
agree with the oracle to the bit, and now and then one rounding falls the other way. So a floor is never
taken smaller than one such event (`walk.Comparison.event`): it may have missed the run's rows by chance.

Two statistics are judged, each within `FACTOR` of its floor:

    worst    the worst row                 floor: the worst row of the floor arms, at least one event
    mean     the mean over rows            floor: the largest mean of a floor arm, at least one event
                                           in 64 rows (in 4 behind several slots), and one
                                           among fewer rows

The worst row finds what happens rarely, the mean what happens everywhere but little; for a MoE layer
the mean is also taken over the rows of each expert, so that a fault of one expert cannot hide among sixteen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]

# The floor is a maximum over the rows of three arms, the error one over those of one. With a tail as heavy
# as 1/x the ratio of two such maxima exceeds 4 in one comparison of thirteen, without any fault; the errors
# are bounded by the formats and far from that heavy: reordered candidates stay below 2 (tests/audit).
FACTOR = 4.0
# Legal orders decide a rounding otherwise in 1 to 6 % of rows, nearly always a smaller one than the event:
# means of 1/400 of an event and less were measured.
EVENT_RATE = 1.0 / 64
# Behind several slots an event stays, in the stream and in caches that later rows read: within a segment of
# eight rounds the mean reached a third of an event.
EVENT_RATE_WHOLE = 1.0 / 4
GAP_FACTOR = 4.0  # both ends of a gap may move by the noise, and the fast arm's may be twice the sample's
FEWEST_ROWS = 3  # of an expert, for its mean to be judged


@dataclass(frozen=True, slots=True)
class RowAt:
    """Where a row comes from."""

    prompt: str
    position: int
    row: int
    width: int

    def __str__(self) -> str:
        return f"{self.prompt}, position {self.position}, row {self.row} at width {self.width}"


@dataclass(frozen=True, slots=True)
class Judged:
    """One output of one slot over the whole run.

    floor:         largest row error of the floor arms.
    worst:         the fast arm's error in the row that is worst against its floor, at: that row;
                   row_floor: its floor, at least one event; ratio: of the two.
    mean_ratio:    of the means; for an expert, if `expert` is not None.
    explained:     rows whose choice differed within the noise; beyond: rows where it differed beyond it,
                   with the largest gap in units of the noise and its place.
    unequal, ulps: share of elements that are not the oracle's, and the largest distance; not judged, because
                   near zero an ulp is nothing.
    tied:          near ties upstream, of other slots, may move a row at will: the worst row is shown and not
                   judged, unless it is not finite. The mean is.
    """

    place: str
    output: str
    rows: int
    floor: float
    worst: float
    row_floor: float
    ratio: float
    at: RowAt | None
    floor_mean: float
    mean: float
    mean_ratio: float
    expert: int | None
    explained: int
    beyond: int
    gap_ratio: float
    gap_at: RowAt | None
    unequal: float
    ulps: int
    tied: bool

    @property
    def reasons(self) -> list[str]:
        """Why it fails, in words; empty if it passes."""
        found = []
        if self.beyond:
            found.append(
                f"{self.place}: {self.beyond} of {self.rows} rows chose differently beyond the choice's noise"
                f" (gap {self.gap_ratio:.3g} times the noise, limit {GAP_FACTOR:g}; {self.gap_at})"
            )
        if not self.ratio <= FACTOR and (not self.tied or not math.isfinite(self.worst)):
            found.append(
                f"{self.place}: {self.output}: the worst row's error {self.worst:.3g} is {self.ratio:.3g}"
                f" times its floor (limit {FACTOR:g}; {self.at})"
            )
        elif not self.mean_ratio <= FACTOR:
            of = "" if self.expert is None else f" over the rows of expert {self.expert}"
            found.append(
                f"{self.place}: {self.output}: the mean error{of} is {self.mean_ratio:.3g} times its floor"
                f" (limit {FACTOR:g})"
            )
        return found


@dataclass(slots=True)
class _Rows:
    errors: dict[str, list[Floats]] = field(default_factory=dict)
    behind: list[Floats] = field(default_factory=list)
    event: list[Floats] = field(default_factory=list)
    gap: list[Floats] = field(default_factory=list)
    experts: list[NDArray[np.int64]] = field(default_factory=list)
    at: list[RowAt] = field(default_factory=list)
    noise: float = 0.0
    unequal: float = 0.0
    ulps: int = 0
    tied: bool = False


class Ledger:
    """Row errors of every place and output of a run, in the order of first appearance."""

    def __init__(self, floor_arms: Sequence[str], event_rate: float = EVENT_RATE) -> None:
        """event_rate: share of rows in which a legal order may show a whole event."""
        self.floor_arms = tuple(floor_arms)
        self.event_rate = event_rate
        self._rows: dict[tuple[str, str], _Rows] = {}

    def add(
        self,
        place: str,
        output: str,
        errors: Mapping[str, Tensor],
        event: Tensor,
        at: Sequence[RowAt],
        behind: Tensor | None = None,
        gap: Tensor | None = None,
        noise: float = 0.0,
        experts: Tensor | None = None,
        unequal: float = 0.0,
        ulps: int = 0,
        tied: bool = False,
    ) -> None:
        """Add the rows of one step; fields as in `walk.Comparison` and `Judged`, errors by arm."""
        rows = self._rows.setdefault((place, output), _Rows())
        for arm in ("fast", *self.floor_arms):
            rows.errors.setdefault(arm, []).append(_floats(errors[arm]))
        rows.behind.append(_floats(errors["fast"] if behind is None else behind))
        rows.event.append(_floats(event))
        rows.gap.append(_floats(torch.zeros_like(event) if gap is None else gap))
        if experts is not None:
            rows.experts.append(experts.cpu().numpy())
        rows.at += at
        rows.tied |= tied
        rows.unequal += unequal * len(at)
        rows.ulps = -1 if min(ulps, rows.ulps) < 0 else max(ulps, rows.ulps)
        rows.noise = max(rows.noise, noise)

    @property
    def places(self) -> set[str]:
        """Every place that has rows."""
        return {place for (place, _), rows in self._rows.items() if rows.at}

    def expert_rows(self, place: str) -> dict[int, int]:
        """How many rows chose each expert of a MoE layer, by the oracle's choice."""
        rows = self._rows.get((place, "partial"))
        if rows is None or not rows.experts:
            return {}
        ids, counts = np.unique(np.concatenate(rows.experts), return_counts=True)
        return dict(zip(ids.tolist(), counts.tolist(), strict=True))

    def judged(self) -> list[Judged]:
        """Every output of every place against its floor."""
        return [self._judge(place, output, rows) for (place, output), rows in self._rows.items()]

    def _judge(self, place: str, output: str, rows: _Rows) -> Judged:
        got, event, gap = (np.concatenate(x) for x in (rows.behind, rows.event, rows.gap))
        floors = [np.concatenate(rows.errors[arm]) for arm in self.floor_arms]
        known = [x[~np.isnan(x)] for x in floors]
        floor = max((float(x.max()) for x in known if x.size), default=0.0)
        floor_mean = max((float(x.mean()) for x in known if x.size), default=0.0)
        row_floors = np.maximum(floor, event)
        ratios = _over(got, row_floors)
        worst = int(ratios.argmax())
        typical = float(event.mean())

        def over_mean(of: Floats) -> float:
            least = max(floor_mean, typical * max(self.event_rate, 1.0 / len(of)))
            return float(_over(of.mean(keepdims=True), np.array([least]))[0])

        mean_ratio, expert = over_mean(got), None
        if rows.experts:
            chosen = np.concatenate(rows.experts)
            own = {int(e): got[(chosen == e).any(axis=1)] for e in np.unique(chosen)}
            own = {e: of for e, of in own.items() if len(of) >= FEWEST_ROWS}
            highest = max((over_mean(of) for of in own.values()), default=0.0)
            if highest > mean_ratio:
                # experts that share rows with a faulty one look bad too; that one is bad on all its rows
                mean_ratio, small = highest, typical * self.event_rate
                expert = max(own, key=lambda e: (float((own[e] > small).mean()), len(own[e])))
        limit = GAP_FACTOR * rows.noise
        over = gap > limit
        widest = int(gap.argmax())
        return Judged(
            place=place,
            output=output,
            rows=len(got),
            floor=floor,
            worst=float(got[worst]),
            row_floor=float(row_floors[worst]),
            ratio=float(ratios[worst]),
            at=rows.at[worst],
            floor_mean=floor_mean,
            mean=float(got.mean()),
            mean_ratio=mean_ratio,
            expert=expert,
            explained=int(((gap > 0) & ~over).sum()),
            beyond=int(over.sum()),
            gap_ratio=float(_over(gap[widest : widest + 1], np.array([rows.noise]))[0]),
            gap_at=rows.at[widest] if gap[widest] > 0 else None,
            unequal=rows.unequal / len(got),
            ulps=rows.ulps,
            tied=rows.tied,
        )


def _over(error: Floats, floor: Floats) -> Floats:
    """error / floor; 0 where both are 0, infinite where only the floor is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, 0.0, np.where(np.isinf(error), np.inf, error / floor))


def _floats(x: Tensor) -> Floats:
    array: Floats = x.detach().double().cpu().numpy()
    return array
