"""How large a rate may still be, given how often it was seen: exact binomial bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided interval of a rate, both ends from 0 to 1."""

    low: float
    high: float


def interval(events: int, trials: int, confidence: float = CONFIDENCE) -> Interval:
    """The exact two-sided interval of a rate.

        low = Beta^-1(a/2; k, n - k + 1),  high = Beta^-1(1 - a/2; k + 1, n - k),  a = 1 - confidence

    Errors:  ValueError unless 0 <= events <= trials and trials >= 1.
    Source:  Clopper and Pearson 1934, Biometrika 26, 404-413.
    """
    _check(events, trials)
    tail = (1.0 - confidence) / 2.0
    low = 0.0 if events == 0 else float(stats.beta.ppf(tail, events, trials - events + 1))
    high = 1.0 if events == trials else float(stats.beta.ppf(1.0 - tail, events + 1, trials - events))
    return Interval(low, high)


def upper(events: float, trials: float, confidence: float = CONFIDENCE) -> float:
    """The largest rate under which so few events still have a chance of 1 - confidence; one-sided, exact.

    Counts may be fractions, as an effective number of trials is. With no event it is
    1 - (1 - confidence)^(1/trials).
    """
    _check(events, trials)
    if events >= trials:
        return 1.0
    return float(stats.beta.ppf(confidence, events + 1, trials - events))


def steps_needed(rate: float, events: int = 0, confidence: float = CONFIDENCE) -> int:
    """The fewest trials that, with `events` events among them, put the one-sided bound at `rate` or below.

    Errors:  ValueError unless 0 < rate < 1.
    """
    if not 0.0 < rate < 1.0:
        raise ValueError(f"steps needed: expected a rate between 0 and 1, got {rate}")
    high = events + 1
    while upper(events, high, confidence) > rate:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if middle <= events or upper(events, middle, confidence) > rate:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True, slots=True)
class Clustered:
    """A rate whose trials come in clusters: steps of one prompt share its prefix and caches.

    events, trials:    over all clusters.
    upper:             one-sided bound, trials taken as independent.
    effective:         trials worth of independent evidence, trials / (1 + (m - 1) rho), where m is the
                       mean cluster size and rho the correlation within a cluster.
    upper_effective:   the bound at the effective number; equal to `upper` while rho cannot be
                       estimated, which is so without an event.
    clusters, clusters_hit, upper_clusters:  clusters, those with any event, and the bound on their share,
                       which needs no assumption about dependence.
    """

    events: int
    trials: int
    upper: float
    effective: float
    upper_effective: float
    clusters: int
    clusters_hit: int
    upper_clusters: float


def clustered(events: Sequence[int], trials: Sequence[int], confidence: float = CONFIDENCE) -> Clustered:
    """Bounds of a rate from its events and trials per cluster.

    The correlation is the one-way analysis-of-variance estimate, clipped to [0, 1].

    Errors:  ValueError if the two do not pair up, or nothing was tried.
    Source:  Ridout, Demetrio and Firth 1999, Biometrics 55, 137-148 (the estimator).
    """
    if len(events) != len(trials):
        raise ValueError(f"clustered: {len(events)} event counts for {len(trials)} trial counts")
    pairs = [(k, n) for k, n in zip(events, trials, strict=True) if n > 0]
    total, hits = sum(n for _, n in pairs), sum(k for k, _ in pairs)
    _check(hits, total)
    rho = _correlation(pairs)
    effective = total / (1.0 + (total / len(pairs) - 1.0) * rho)
    touched = sum(k > 0 for k, _ in pairs)
    return Clustered(
        events=hits,
        trials=total,
        upper=upper(hits, total, confidence),
        effective=effective,
        upper_effective=upper(hits * effective / total, effective, confidence),
        clusters=len(pairs),
        clusters_hit=touched,
        upper_clusters=upper(touched, len(pairs), confidence),
    )


def _correlation(pairs: Sequence[tuple[int, int]]) -> float:
    clusters, total = len(pairs), sum(n for _, n in pairs)
    rate = sum(k for k, _ in pairs) / total
    if clusters < 2 or total <= clusters or rate in (0.0, 1.0):
        return 0.0
    between = sum(n * (k / n - rate) ** 2 for k, n in pairs) / (clusters - 1)
    within = sum(k * (1.0 - k / n) for k, n in pairs) / (total - clusters)
    size = (total - sum(n * n for _, n in pairs) / total) / (clusters - 1)
    spread = between + (size - 1.0) * within
    return 0.0 if spread == 0.0 else min(1.0, max(0.0, (between - within) / spread))


def more_often(events: int, trials: int, control_events: int, control_trials: int) -> float:
    """One-sided p-value that the first rate is above the control's: Fisher's exact test."""
    table = [[events, trials - events], [control_events, control_trials - control_events]]
    return float(stats.fisher_exact(table, alternative="greater").pvalue)


def _check(events: float, trials: float) -> None:
    if trials <= 0 or not 0 <= events <= trials or math.isnan(events):
        raise ValueError(f"bounds: expected 0 <= events <= trials and trials > 0, got {events} of {trials}")
