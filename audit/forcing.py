"""Judging what lies behind a near tie: the oracle run again on the choice that the fast arm made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from audit import choices
from audit.arms import Arms, At, Run
from audit.measures import row_error
from mono.caches import LayerCache
from mono.interface import Carry
from mono.layers import moe, sparse_attention
from mono.step import Step

NEAR_TIE = 8.0  # a routing gap this many times the noise is looked at from both sides


@dataclass(frozen=True, slots=True)
class Choice:
    """How the arms chose at one slot; see `Comparison` for gap, noise and experts.

    tied:    by floor arm, [T] bool, rows where it chose otherwise than the oracle.
    forced:  [T, H], the oracle's partial output on the choice that the fast arm made.
    """

    tied: Mapping[str, Tensor]
    gap: Tensor
    noise: float
    forced: Tensor
    experts: Tensor | None = None


def selection(
    arms: Arms, at: At, runs: Mapping[str, Run], scratch: LayerCache, spec: sparse_attention.Spec
) -> Choice:
    rows, weights = slice(0, at.step.rows), arms.weights[at.index]
    assert isinstance(weights, sparse_attention.Weights)
    oracle, fast = runs["oracle"], runs["fast"]
    assert oracle.scores is not None
    assert oracle.carry.selected is not None
    scores, own = oracle.scores[rows], oracle.carry.selected[rows]

    def gap_of(run_: Run) -> Tensor:
        if run_.carry.selected is None or run_.carry.selected.shape != oracle.carry.selected.shape:  # type: ignore[union-attr]
            return torch.full((at.step.rows,), float("inf"), dtype=torch.float64, device=scores.device)
        return choices.selection_gap(scores, own, run_.carry.selected[rows]).amax(dim=1)

    gap = gap_of(fast)
    forced = _partial(oracle, rows)
    if bool(torch.isfinite(gap).all()) and bool((gap > 0).any()):
        layer = choices.oracle_on_selection(spec, weights)
        carry = replace(at.carry, selected=fast.carry.selected)
        forced = _rows(layer(carry, at.step.step, scratch).partial, rows)
    return Choice(
        tied={name: gap_of(runs[name]) > 0 for name in arms.floor_arms},
        gap=gap,
        noise=_noise(arms, runs, rows, spec.index_dim),
        forced=forced,
    )


def experts(arms: Arms, at: At, runs: Mapping[str, Run], scratch: LayerCache, spec: moe.Spec) -> Choice:
    """The fast arm does not say which experts it ran. Where the oracle's choice is nearly a tie, its output
    is held against both choices, and the row made the one that it is nearer to."""
    rows, weights = slice(0, at.step.rows), arms.weights[at.index]
    assert isinstance(weights, moe.Weights)
    oracle = runs["oracle"]
    assert oracle.scores is not None
    scores = oracle.scores[rows]
    noise = _noise(arms, runs, rows, spec.hidden)
    order, boundary = choices.ranked(scores), choices.boundary_gap(scores, spec.topk)
    forced, got = _partial(oracle, rows).clone(), _partial(runs["fast"], rows)
    gap = torch.zeros_like(boundary)
    for row in torch.nonzero(boundary <= NEAR_TIE * noise)[:, 0].tolist():
        layer = choices.oracle_with_runner_up(spec, weights, order[row])
        other = _rows(
            layer(_carry_row(at.carry, row), _step_row(at.step.step, row), scratch).partial, slice(0, 1)
        )
        here, there = (row_error(got[row : row + 1], want) for want in (forced[row : row + 1], other))
        if there < here:
            forced[row], gap[row] = other[0], boundary[row]
    tied = {}
    for name in arms.floor_arms:
        theirs = runs[name].scores
        assert theirs is not None
        tied[name] = ~choices.same_experts(scores, theirs[rows], spec.topk)
    return Choice(tied, gap, noise, forced, order[:, : spec.topk])


def _noise(arms: Arms, runs: Mapping[str, Run], rows: slice, terms: int) -> float:
    """Largest difference of a score from the oracle's on any floor arm; at least what a sum of so many terms
    may lose in fp32, sqrt(terms) x 2^-24 of the largest score, in whatever order."""
    oracle = runs["oracle"].scores
    assert oracle is not None
    known = torch.where(torch.isfinite(oracle[rows]), oracle[rows].abs(), 0.0)
    noise = float(known.max()) * math.sqrt(terms) * 2.0**-24
    for name in arms.floor_arms:
        scores = runs[name].scores
        assert scores is not None
        noise = max(noise, float(choices.score_noise(scores[rows], oracle[rows]).max()))
    return noise


def _partial(run_: Run, rows: slice) -> Tensor:
    return _rows(run_.carry.partial, rows)


def _rows(x: Tensor | None, rows: slice) -> Tensor:
    assert x is not None  # every slot but the head leaves a partial output
    return x[rows]


def _carry_row(carry: Carry, row: int) -> Carry:
    return _each(carry, lambda x: x[row : row + 1])


def _each(carry: Carry, change: Callable[[Tensor], Tensor]) -> Carry:
    values = {f.name: getattr(carry, f.name) for f in fields(carry)}
    return replace(carry, **{name: change(x) for name, x in values.items() if x is not None})


def _step_row(step: Step, row: int) -> Step:
    request, at = row // step.q_len, slice(row, row + 1)
    return Step(
        step.tokens[at], step.positions[at], step.slots[at], step.visible[at],
        step.block_tables[request : request + 1], 1,
    )  # fmt: skip
