"""Which drafts a verify step accepts, and what it emits: pure functions of tensors.

Row j of a request has read the anchor and the drafts d_1 .. d_j, so it judges d_{j+1}; the last row only
yields the bonus token. With A drafts accepted, rows 0 to A are *decisive*: no other row can change what is
emitted, for it has read a rejected token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5  # temperatures below this are greedy: dividing by them would only lose digits


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What one verify step decided for B requests; q = 1 + draft_len.

    accepted: [B] int64, A: leading drafts accepted, 0 to draft_len, before any stop or length cut.
    emitted:  [B, q] int64, the accepted drafts, then the target's own token, then -1.
    """

    performance_only: ClassVar[Literal[False]] = False

    accepted: Tensor
    emitted: Tensor


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A forced acceptance, with the fields of `Acceptance` and none of its meaning.

    The drafts were not checked, so the text is not the model's, and a broken drafter costs nothing: good
    for timing two target paths on equal work, and for nothing else. A type of its own, so that what asks for
    an `Acceptance` cannot be handed one.
    """

    performance_only: ClassVar[Literal[True]] = True

    accepted: Tensor
    emitted: Tensor


def accept_greedy(drafts: Tensor, top1: Tensor) -> Acceptance:
    """The longest prefix of drafts that the target would have produced itself, and the token after it.

        A = largest a with d_i = y_{i-1} for all i <= a;   emitted = d_1 .. d_A, y_A

    Shapes:  drafts [B, draft_len] int64; top1 [B, draft_len + 1] int64, y_j of row j, the largest
             true-vocabulary logit with the lowest id on a tie (`mono.reference.ops.top1`). So a padded
             vocabulary column, which is no row's top-1, is never accepted.
    Errors:  ValueError naming the shapes or dtype.
    """
    _check_drafts(drafts, top1, "top1")
    accepted = _prefix(drafts == top1[:, :-1])
    return Acceptance(accepted, _emit(drafts, accepted, top1.gather(1, accepted[:, None])))


def accept_sampled(
    drafts: Tensor, draft_probs: Tensor | None, target_probs: Tensor, uniforms: Tensor
) -> Acceptance:
    """Accept and resample so that what is emitted follows the target's distribution exactly.

        accept d_i           if u_i p_d(d_i) < p_t(d_i), that is with probability min(1, p_t(d_i) / p_d(d_i))
        at the first refusal sample from max(p_t - p_d, 0), normalised
        if all are accepted  sample the bonus from p_t of the last row

    draft_probs:  [B, draft_len, V], the distributions the drafts were sampled from; None for drafts that
                  were not sampled, whose distribution is one-hot: then d_i is accepted with probability
                  p_t(d_i) and a refusal samples p_t without d_i.
    target_probs: [B, draft_len + 1, V], processed (`processed_distribution`).
    uniforms:     [B, draft_len + 1, 2] in [0, 1), see `keyed_uniforms`: of row j, the first decides on
                  d_{j+1}, the second samples there.
    Rounding:     float64 throughout. A residual without mass (p_t = p_d) cannot be refused into but for
                  rounding; p_t is sampled then.
    Temperature:  below 1e-5 both distributions are one-hot and the rule is `accept_greedy`.
    Errors:       ValueError naming the shapes, a draft outside the V columns, or probabilities that are none.
    Source:       Leviathan et al. 2022, arXiv:2211.17192, section 2.3; Chen et al. 2023, arXiv:2302.01318.
    """
    B, length = drafts.shape
    V = target_probs.shape[-1]
    if tuple(target_probs.shape) != (B, length + 1, V):
        raise ValueError(
            f"accept_sampled: target_probs: expected [{B}, {length + 1}, V], got {list(target_probs.shape)}"
        )
    if draft_probs is not None and tuple(draft_probs.shape) != (B, length, V):
        raise ValueError(
            f"accept_sampled: draft_probs: expected [{B}, {length}, {V}], got {list(draft_probs.shape)}"
        )
    if tuple(uniforms.shape) != (B, length + 1, 2):
        raise ValueError(
            f"accept_sampled: uniforms: expected [{B}, {length + 1}, 2], got {list(uniforms.shape)}"
        )
    if drafts.numel() and (int(drafts.min()) < 0 or int(drafts.max()) >= V):
        raise ValueError(f"accept_sampled: drafts: expected ids 0 to {V - 1}, got {drafts.tolist()}")
    for name, probs in (("target_probs", target_probs), ("draft_probs", draft_probs)):
        if probs is None:
            continue
        total = probs.sum(-1, keepdim=True)
        # a NaN compares false, so no row that holds one passes
        if not bool(((probs >= 0) & (total > 0) & (total < math.inf)).all()):
            raise ValueError(f"accept_sampled: {name}: expected finite probabilities, not all zero in a row")
    p_t = target_probs.double()
    if draft_probs is None:
        p_d = torch.nn.functional.one_hot(drafts, V).double()
    else:
        p_d = draft_probs.double()

    t, d = (p.gather(2, drafts[:, :, None]).squeeze(2) for p in (p_t[:, :-1], p_d))  # [B, length]
    accepted = _prefix(uniforms[:, :-1, 0] * d < t)

    # the bonus row has no draft to take away
    residual = torch.cat([(p_t[:, :-1] - p_d).clamp(min=0), p_t[:, -1:]], dim=1)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_t)  # [B, q, V]
    at = accepted[:, None, None].expand(-1, 1, V)
    own = sample(residual.gather(1, at).squeeze(1), uniforms[:, :, 1].gather(1, accepted[:, None]).squeeze(1))
    return Acceptance(accepted, _emit(drafts, accepted, own[:, None]))


def processed_distribution(
    logits: Tensor,
    vocab: int,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """The distribution that is sampled: softmax at a temperature, then its top-k, then its top-p.

    top_k: only the k most probable tokens stay, the lower id first among equals.
    top_p: only the fewest most probable tokens that together reach p stay, at least one.
    Below temperature 1e-5 the distribution is one-hot at the top-1, lowest id on a tie.

    Shapes:    logits [..., V] with V >= vocab; returns [..., V] float64, zero in padded columns.
    Errors:    ValueError for a negative or infinite temperature, top_k below 1, or top_p outside (0, 1].
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature: expected a finite number of at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected in (0, 1], got {top_p}")
    true = logits[..., :vocab].double()
    order = true.argsort(dim=-1, descending=True, stable=True)  # stable: lower ids first among equals
    ranked = true.gather(-1, order)
    rank = torch.arange(vocab, device=logits.device)
    if temperature < GREEDY_BELOW:
        p = (rank == 0).double().expand_as(ranked)
    else:
        kept = ranked if top_k is None else torch.where(rank < top_k, ranked, float("-inf"))
        p = (kept / temperature).softmax(dim=-1)
        if top_p is not None:
            before = p.cumsum(dim=-1) - p
            p = torch.where((before < top_p) | (rank == 0), p, 0.0)
            p = p / p.sum(dim=-1, keepdim=True)
    return torch.zeros_like(logits, dtype=torch.float64).scatter(-1, order, p)


def sample(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which the running sum of `probs` first exceeds `uniforms` of its total.

    Shapes:  probs [B, V] float64, not necessarily normalised; uniforms [B] in [0, 1). Returns [B] int64,
             always a token of positive probability.
    """
    running = probs.cumsum(dim=1)
    past = running > uniforms.double()[:, None] * running[:, -1:]
    ids = torch.arange(probs.shape[1], device=probs.device)
    last = torch.where(probs > 0, ids, 0).amax(dim=1)  # where rounding put the mark on the total itself
    return torch.minimum(torch.where(past, ids, probs.shape[1]).amin(dim=1), last)


def keyed_uniforms(seed: int, requests: Tensor, positions: Tensor, rows: int) -> Tensor:
    """Two uniform numbers for every judged position: a pure function of (seed, request, position).

    So a run replays whatever the batch, the slots or the number of rounds, and ranks agree without talking.
    Drawing again for a position that an earlier round judged behind its first refusal is lossless: nothing
    that was emitted depended on the earlier draw.

    Shapes:  requests [B] int64, positions [B] int64, the anchors'; row j judges position + 1 + j. Returns
             [B, rows, 2] float64 in [0, 1).
    Source:  the finaliser of SplitMix64 (Steele, Lea and Flood 2014), applied once per key word.
    """
    at = positions[:, None] + 1 + torch.arange(rows, device=positions.device)  # [B, rows]
    state = _mix(torch.full_like(at, _signed(seed)))
    for word in (requests[:, None].expand_as(at), at):
        state = _mix(state ^ word)
    pair = torch.stack([_mix(state), _mix(state ^ 1)], dim=-1)
    return _shifted(pair, 11).double() * 2.0**-53


@dataclass(frozen=True, slots=True)
class SyntheticSchedule:
    """Forced acceptance of a given mean, with the least variance a mean allows.

    With a = mean_length - 1 and k its whole part, k drafts are always accepted and one more with
    probability a - k.

    mean_length: tokens per round, the bonus counted: 1 to 1 + draft_len.
    verify:      must be `fixed`: a confidence schedule may cut a request below the forced length unseen.
    Errors:      ValueError naming the field.
    """

    performance_only: ClassVar[Literal[True]] = True

    mean_length: float
    draft_len: int
    seed: int = 0
    verify: str = field(default="fixed", kw_only=True)

    def __post_init__(self) -> None:
        if not 1 <= self.mean_length <= 1 + self.draft_len:
            raise ValueError(
                f"synthetic acceptance: mean_length: expected 1 to {1 + self.draft_len},"
                f" got {self.mean_length}"
            )
        if self.verify != "fixed":
            raise ValueError(
                f"synthetic acceptance: verify: expected 'fixed', got {self.verify!r}: a schedule may verify"
                " fewer rows than the forced length"
            )

    @property
    def rates(self) -> tuple[float, ...]:
        """Unconditional acceptance rate of each draft: ones, the fraction, zeros."""
        accepted = self.mean_length - 1
        return tuple(min(max(accepted - i, 0.0), 1.0) for i in range(self.draft_len))

    def accept(self, drafts: Tensor, top1: Tensor, uniforms: Tensor) -> Synthetic:
        """`synthetic_acceptance` under this schedule."""
        return synthetic_acceptance(self, drafts, top1, uniforms)


def synthetic_acceptance(
    schedule: SyntheticSchedule, drafts: Tensor, top1: Tensor, uniforms: Tensor
) -> Synthetic:
    """Accept a scheduled number of drafts without looking at them. Performance only.

    Accepted positions emit the draft, the first refused one the target's top-1.

    Shapes:  drafts [B, draft_len], top1 [B, draft_len + 1] int64; uniforms [B] in [0, 1), one for each
             request, the same on all ranks: with at most one rate between 0 and 1, one draw decides all.
    Errors:  ValueError naming the shapes, or a draft length other than the schedule's.
    """
    _check_drafts(drafts, top1, "top1")
    if drafts.shape[1] != schedule.draft_len:
        raise ValueError(
            f"synthetic acceptance: expected {schedule.draft_len} drafts a request, got {drafts.shape[1]}"
        )
    rates = torch.tensor(schedule.rates, dtype=torch.float64, device=drafts.device)
    accepted = _prefix(uniforms.double()[:, None] < rates)
    return Synthetic(accepted, _emit(drafts, accepted, top1.gather(1, accepted[:, None])))


def decisive_rows(accepted: Tensor, q_len: int) -> Tensor:
    """[B, q_len] bool: rows 0 to A of each request, the ones that can change what is emitted."""
    return torch.arange(q_len, device=accepted.device) <= accepted[:, None]


def _prefix(agrees: Tensor) -> Tensor:
    """[B] int64, how many leading entries of [B, n] bool are true."""
    return agrees.long().cumprod(dim=1).sum(dim=1)


def _emit(drafts: Tensor, accepted: Tensor, own: Tensor) -> Tensor:
    """[B, q]: the accepted drafts, the target's own token [B, 1], then -1."""
    at = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    padded = torch.nn.functional.pad(drafts, (0, 1), value=-1)
    count = accepted[:, None]
    return torch.where(at < count, padded, torch.where(at == count, own, -1))


def _check_drafts(drafts: Tensor, judged: Tensor, name: str) -> None:
    B, length = drafts.shape
    if tuple(judged.shape) != (B, length + 1):
        raise ValueError(f"acceptance: {name}: expected [{B}, {length + 1}], got {list(judged.shape)}")
    for what, x in (("drafts", drafts), (name, judged)):
        if x.dtype != torch.int64:
            raise ValueError(f"acceptance: {what}: expected int64, got {x.dtype}")


def _signed(word: int) -> int:
    """A 64-bit word as torch holds it."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's step and finaliser; int64 products wrap."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)
