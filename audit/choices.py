"""Discrete choices, compared as choices: which KV blocks a row attends to, which experts it runs.

Two arms that sum in another order may choose differently where the candidates are nearly equal. Such a flip
is *explained* if the gap between what was chosen and what was left out lies within that gap's own noise, as
the floor arms show it; beyond the noise it is an error. What lies behind a flip is still judged: the float64
oracle is run again with the choice forced to the one the row made, and the row's error is measured against
that. So a near tie does not drown a row, and nothing hides behind one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mono.caches import LayerCache
from mono.interface import Carry, Layer
from mono.layers import moe, sparse_attention
from mono.parallel import SOLO
from mono.reference import moe as reference_moe
from mono.reference import sparse_attention as reference_sparse_attention
from mono.reference.numerics import FLOAT64, Numerics
from mono.reference.ops.attention import norm_rope
from mono.reference.ops.index import block_scores
from mono.reference.ops.linear import linear
from mono.reference.ops.rms_norm import absorb, gemma_rms_norm
from mono.step import Step

FORCING = 1e4  # added to a routing bias; scores lie between 0 and 1, so this decides


def index_scores(
    spec: sparse_attention.Spec,
    weights: sparse_attention.Weights,
    carry: Carry,
    step: Step,
    cache: LayerCache,
    numerics: Numerics,
) -> Tensor:
    """Scores of every KV block, [T, G, M] fp32, as the reference computes them under `numerics`.

    Forced blocks are +inf and blocks without a visible key -inf. `cache` holds the step's own keys.
    """
    G, width = spec.kv_heads, spec.index_dim
    first = (spec.heads + 2 * G) * spec.head_dim
    x = gemma_rms_norm(absorb(carry, SOLO), weights.norm, spec.eps, numerics)  # [T, H] fp32
    query = linear(x, weights.qkv.rows(first, first + G * width), numerics).bfloat16().view(-1, G, width)
    query = norm_rope(query, weights.index_q_norm, spec.eps, weights.rope, step.positions, numerics)
    scores = block_scores(query, cache, step, numerics)
    block = torch.arange(scores.shape[2], device=scores.device)
    blocks = ((step.visible.long() + spec.block_size - 1) // spec.block_size)[:, None]
    forced = (block < spec.init_blocks) | (block >= blocks - spec.local_blocks)
    scores = torch.where(forced[:, None, :], float("inf"), scores)
    return torch.where((block < blocks)[:, None, :], scores, float("-inf"))


def selection_gap(scores: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
    """How far apart in `scores` two selections are: [T, G] float64.

        gap = largest score that only `chosen` holds - smallest score that only `other` holds

    Zero where the two agree; infinite where `other` left out a forced block, took one without keys, holds
    another number of blocks, or does not list them in ascending order with -1 behind the last.

    Shapes:  scores [T, G, M] of the oracle; chosen, other [T, G, S] int32.
    """
    M = scores.shape[2]
    mine, theirs = _members(chosen, M), _members(other, M)
    wide = scores.double()
    best_lost = torch.where(mine & ~theirs, wide, float("-inf")).amax(-1)
    worst_taken = torch.where(theirs & ~mine, wide, float("inf")).amin(-1)
    gap = torch.where((mine == theirs).all(-1), 0.0, best_lost - worst_taken)
    well_formed = (chosen >= 0).sum(-1) == theirs.sum(-1)
    behind = torch.where(other < 0, M, other)
    well_formed &= (other >= -1).all(-1) & (other < M).all(-1) & (behind.diff(dim=-1) >= 0).all(-1)
    return torch.where(well_formed & ~gap.isnan(), gap.clamp(min=0.0), float("inf"))


def _members(selected: Tensor, blocks: int) -> Tensor:
    named = torch.arange(blocks, device=selected.device)
    return (selected.unsqueeze(-1) == named).any(dim=-2)  # [T, G, M]


def score_noise(scores: Tensor, oracle: Tensor) -> Tensor:
    """[T] float64: largest difference of any score of a row from the oracle's, infinite scores left out."""
    apart = (scores.double() - oracle.double()).abs().flatten(1)
    return torch.where(torch.isfinite(oracle.flatten(1)), apart, 0.0).amax(dim=1)


def oracle_on_selection(spec: sparse_attention.Spec, weights: sparse_attention.Weights) -> Layer:
    """The float64 layer that attends to the blocks in `carry.selected` in place of choosing its own."""
    return reference_sparse_attention.build(replace(spec, selects=False), weights, SOLO, FLOAT64)


def router_scores(spec: moe.Spec, weights: moe.Weights, carry: Carry, numerics: Numerics) -> Tensor:
    """What experts are ranked by, [T, E] fp32: the score plus the correction bias, under `numerics`."""
    x = gemma_rms_norm(absorb(carry, SOLO), weights.norm, spec.eps, numerics).bfloat16()
    return torch.sigmoid(numerics.matmul(x.float(), weights.router)) + weights.bias


def ranked(scores: Tensor) -> Tensor:
    """[T, E] experts, best first, the lower id first among equals."""
    return torch.argsort(scores, dim=1, descending=True, stable=True)


def same_experts(scores: Tensor, other: Tensor, topk: int) -> Tensor:
    """[T] bool: rows whose `topk` best experts are the same set under both scores."""
    mine, theirs = (ranked(s)[:, :topk].sort(dim=1).values for s in (scores, other))
    return (mine == theirs).all(dim=1)


def boundary_gap(scores: Tensor, topk: int) -> Tensor:
    """[T] float64: score of the last expert chosen minus that of the first left out; infinite if none is."""
    best = scores.double().sort(dim=1, descending=True).values
    if topk >= best.shape[1]:
        return torch.full((len(best),), float("inf"), dtype=torch.float64, device=best.device)
    return best[:, topk - 1] - best[:, topk]


def oracle_with_runner_up(spec: moe.Spec, weights: moe.Weights, order: Tensor) -> Layer:
    """The float64 layer of one row whose last chosen expert gives way to the first that was left out.

    order:  [E], the row's experts, best first. Only the choice is forced: through the correction bias,
            which never weighs.
    """
    chosen = torch.cat([order[: spec.topk - 1], order[spec.topk : spec.topk + 1]])
    bias = torch.zeros_like(weights.bias)
    bias[chosen] = FORCING
    return reference_moe.build(spec, replace(weights, bias=bias), SOLO, FLOAT64)
