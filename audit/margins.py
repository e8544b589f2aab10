"""Near tie or real error? Every row's margin, its change on another arm, and the noise of that change.

    g = z[a] - z[b],  a and b the reference's first and second token
    D = (z'[a] - z'[b]) - g,  z' the other arm's logits

A flip needs D <= -g. How large D normally is, the floor arms say: the same reference with its sums in another
legal order. So each flip is judged against measured noise, and a fault shows in D long before it flips a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FlipClass = Literal["T0", "T1", "T2", "T3"]
Floats = NDArray[np.float64]

# The largest change is a maximum over the rows of three arms, a flip's is that of a fourth, and the tail is
# heavy: for the ratio of two such maxima see `floor.FACTOR`. At the largest itself clean runs fail.
LARGEST = 4.0
TO_SIGMA = 1.4826  # a normal distribution's sigma over its median absolute deviation


@dataclass(frozen=True, slots=True)
class Margins:
    """The reference's two best tokens of each row. first, second [T] int64; gap, ulp [T] float64.

    ulp is one step of the stored fp32 logits at the larger of the two.
    """

    first: Tensor
    second: Tensor
    gap: Tensor
    ulp: Tensor


def margins(logits: Tensor, vocab: int) -> Margins:
    """First and second token of each row among the `vocab` true ones, lowest id on a tie.

    Shapes:  logits [T, V] fp32 with V >= vocab >= 2.
    """
    true = logits[:, :vocab].double()
    order = torch.argsort(true, dim=1, descending=True, stable=True)  # equal logits keep ascending ids
    first, second = order[:, 0], order[:, 1]
    best = true.gather(1, order[:, :2])
    top = best.abs().amax(dim=1).clamp(min=2.0**-126)
    return Margins(first, second, best[:, 0] - best[:, 1], torch.exp2(torch.floor(torch.log2(top)) - 23))


def margin_change(logits: Tensor, of: Margins) -> Tensor:
    """[T] float64: change of each row's margin on another arm, its logits [T, V]; NaN if not finite."""
    z = logits.double()
    first, second = (z.gather(1, ids[:, None])[:, 0] for ids in (of.first, of.second))
    return first - second - of.gap


def robust_sigma(change: Floats) -> float:
    """1.4826 times the median absolute deviation from the median. 0 for an empty array."""
    if change.size == 0:
        return 0.0
    return float(TO_SIGMA * np.median(np.abs(change - np.median(change))))


def size(change: Floats) -> float:
    """Root mean square of the changes, the largest 1 % pulled in. 0 for an empty array.

    Unlike the robust sigma it counts rare changes: on most rows rounding hides another order of sums
    altogether, so that half the changes, and with them the robust sigma, are a last bit. The largest 1 % are
    near ties of experts and KV blocks, one of which would outweigh all. Infinite if any is not finite.
    """
    if not np.isfinite(change).all():
        return math.inf
    return float(np.sqrt(np.mean(np.square(_pulled_in(change))))) if change.size else 0.0


def size_where_changed(change: Floats) -> float:
    """Size of a change where there is one: the sum of D^2 over the sum of |D|, the largest 1 % pulled in.

    If a share of the rows changes by s and the others not at all, this is s, whatever the share; for normal
    changes it is 1.25 sigma. So it says how large the size of an arm may be that changes every row.
    """
    changed = _pulled_in(change)
    total = float(changed.sum())
    return float(np.square(changed).sum() / total) if total > 0 else 0.0


def _pulled_in(change: Floats) -> Floats:
    magnitude: Floats = np.abs(change)
    return np.minimum(magnitude, np.quantile(magnitude, 0.99)) if magnitude.size else magnitude


@dataclass(frozen=True, slots=True)
class Noise:
    """How much the margin changes under legal orders of sums.

    sigma:     the largest robust sigma of the floor arms. size: the largest size where changed.
    largest:   the largest change any floor arm showed on any of these rows. The distribution has a heavy
               tail: where an expert or a KV block is a near tie, the last bit decides it, and with it
               much more than the last bit.
    changes:   all changes of all floor arms, ascending: the noise as it was measured.
    """

    sigma: float
    size: float
    largest: float
    changes: Floats

    @property
    def limit(self) -> float:
        """A flip at a margin beyond this is no noise."""
        return LARGEST * self.largest


def noise_of(floor_changes: list[Floats]) -> Noise:
    """Noise from the margin changes of the floor arms, one array each, over the same rows."""
    finite = [change[np.isfinite(change)] for change in floor_changes]
    together = np.sort(np.concatenate(finite)) if finite else np.zeros(0)
    return Noise(
        sigma=max((robust_sigma(change) for change in finite), default=0.0),
        size=max((size_where_changed(change) for change in finite), default=0.0),
        largest=float(np.abs(together).max()) if together.size else 0.0,
        changes=together,
    )


@dataclass(frozen=True, slots=True)
class Shift:
    """A mean change of the margin and its standard error."""

    mean: float
    error: float

    @property
    def sigmas(self) -> float:
        """Mean over its standard error; infinite for a mean without spread."""
        if self.mean == 0.0:
            return 0.0
        return abs(self.mean) / self.error if self.error > 0 else math.inf


def shift(change: Floats) -> Shift:
    """Mean of the change after winsorising 5 % at each end.

    The ends are pulled in because a few rows behind a near tie (see `Noise.largest`) would otherwise make
    the mean's own error larger than any bias worth finding. Source for the error: Tukey and
    McLaughlin 1963, Sankhya A 25, 331-352, the winsorised variance over (1 - 2 x 0.05)^2 n.
    """
    if change.size < 2:
        return Shift(float(change.sum()), math.inf)
    low, high = np.quantile(change, [0.05, 0.95])
    pulled = np.clip(change, low, high)
    return Shift(float(pulled.mean()), float(pulled.std(ddof=1) / (0.9 * math.sqrt(change.size))))


def classify(gap: float, ulp: float, noise: Noise) -> FlipClass:
    """What kind of flip it is.

    gap: the reference's logit of its own token minus that of the token it gave way to. Mostly that is the
         second one; where several are nearly equal it may be a third, and this is more than the margin.
    T0: an exact tie in the stored logits, so the tie rule decided. T1: a gap within one ulp of them.
    T2: a gap within the measured noise. T3: a real error.
    """
    if gap == 0.0:
        return "T0"
    if gap <= ulp:
        return "T1"
    return "T2" if gap <= noise.limit else "T3"


def expected_flips(gap: Floats, noise: Noise) -> float:
    """Flips that the measured noise would cause: the sum over rows of the share of changes D <= -g."""
    if noise.changes.size == 0:
        return 0.0
    below = np.searchsorted(noise.changes, -gap, side="right")
    return float(below.sum() / noise.changes.size)
