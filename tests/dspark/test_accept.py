"""What a verify step accepts and emits, greedy, sampled and forced."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from mono.dspark import (
    Acceptance,
    Synthetic,
    SyntheticSchedule,
    accept_greedy,
    accept_sampled,
    decisive_rows,
    keyed_uniforms,
    processed_distribution,
    synthetic_acceptance,
)
from mono.dspark.acceptance import sample
from mono.reference.ops.top1 import top1

V, PADDED, DRAFTS = 20, 24, torch.tensor([[3, 1, 4, 1, 5, 9, 2]])


def logits_for(winners: list[int]) -> Tensor:
    """[8, PADDED] with `winners` on top, and larger numbers still in the padded columns."""
    z = torch.zeros(8, PADDED)
    z[torch.arange(8), torch.tensor(winners)] = 4.0
    z[:, V:] = 9.0
    return z


@pytest.mark.parametrize("accepted", range(8))
@pytest.mark.parametrize("tie", ["none", "with a higher id", "with a lower id"])
def test_every_accepted_length_with_and_without_a_tie_at_the_decisive_row(accepted: int, tie: str) -> None:
    """Row A decides: its top-1 is the correction, or the bonus when all drafts are accepted."""
    drafts = DRAFTS[0].tolist()
    own = 11  # no draft
    z = logits_for([*drafts[:accepted], own, *[0] * (7 - accepted)])
    if tie != "none":
        z[accepted, own + (1 if tie == "with a higher id" else -1)] = z[accepted, own]
    won = own - 1 if tie == "with a lower id" else own
    got = accept_greedy(DRAFTS, top1(z, V)[None])
    assert got.accepted.tolist() == [accepted]
    assert got.emitted.tolist() == [[*drafts[:accepted], won, *[-1] * (7 - accepted)]]
    assert decisive_rows(got.accepted, 8).tolist() == [[j <= accepted for j in range(8)]]


@pytest.mark.parametrize("accepted", range(7))
def test_a_tie_with_the_draft_itself_goes_to_the_lower_id(accepted: int) -> None:
    """The next draft ties with the correction: accepted if its id is the lower one, refused otherwise."""
    drafts = DRAFTS[0].tolist()
    draft = drafts[accepted]
    for other, expected in ((draft + 1, accepted + 1), (draft - 1, accepted)):
        z = logits_for([*drafts[:accepted], other, *[0] * (7 - accepted)])
        z[accepted, draft] = z[accepted, other]
        got = accept_greedy(DRAFTS, top1(z, V)[None])
        assert got.accepted.item() == expected
        assert got.emitted[0, accepted].item() == min(draft, other)


def test_rows_behind_the_decisive_one_change_nothing() -> None:
    rows = torch.randint(0, V, (64, 8))
    rows[:, :3] = torch.tensor([3, 1, 0])
    got = accept_greedy(DRAFTS.expand(64, -1), rows)
    assert (got.accepted == 2).all()
    assert (got.emitted == torch.tensor([3, 1, 0, -1, -1, -1, -1, -1])).all()


def test_a_padded_vocabulary_column_is_never_accepted() -> None:
    """A drafter that proposes the loudest column of all, which is padding, gets nothing."""
    drafts = torch.full((1, 7), PADDED - 1)
    z = logits_for([6] * 8)
    assert z.argmax(dim=1).min() >= V  # so an argmax over all columns would fall for it
    got = accept_greedy(drafts, top1(z, V)[None])
    assert got.accepted.tolist() == [0]
    assert got.emitted[0].tolist() == [6, *[-1] * 7]
    probs = processed_distribution(z[None], V, temperature=1.0)
    assert probs[..., V:].sum() == 0
    sampled = accept_sampled(drafts, None, probs, keyed_uniforms(0, torch.tensor([0]), torch.tensor([0]), 8))
    assert sampled.accepted.tolist() == [0]
    assert sampled.emitted[0, 0] < V


def test_shapes_and_types_are_named() -> None:
    with pytest.raises(ValueError, match=r"top1: expected \[1, 8\], got \[1, 7\]"):
        accept_greedy(DRAFTS, DRAFTS)
    with pytest.raises(ValueError, match="drafts: expected int64"):
        accept_greedy(DRAFTS.int(), torch.zeros(1, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"target_probs: expected \[1, 8, V\]"):
        accept_sampled(DRAFTS, None, torch.zeros(1, 7, V), torch.zeros(1, 8, 2))
    with pytest.raises(ValueError, match="expected ids 0 to 3"):
        accept_sampled(DRAFTS, None, torch.zeros(1, 8, 4), torch.zeros(1, 8, 2))


@pytest.mark.parametrize("spoilt", [[float("nan"), 0.5], [float("inf"), 0.5], [-0.5, 1.5], [0.0, 0.0]])
def test_what_is_no_distribution_is_never_sampled(spoilt: list[float]) -> None:
    even = torch.full((1, 8, V), 1 / V)
    wrong = even.clone()
    wrong[0, 6, :] = 0
    wrong[0, 6, :2] = torch.tensor(spoilt)
    for draft, target, name in ((None, wrong, "target_probs"), (wrong[:, :7], even, "draft_probs")):
        with pytest.raises(ValueError, match=f"{name}: expected finite probabilities, not all zero in a row"):
            accept_sampled(DRAFTS, draft, target, torch.zeros(1, 8, 2))


# Sampling

ALPHA = 1e-3  # chance that a right rule fails one of these tests, over all seeds; the seed is fixed
ROUNDS, SMALL = 40_000, 5


def language(seed: int) -> tuple[Tensor, Tensor]:
    """A first-token distribution [V] and next-token distributions [V, V], float64."""
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(SMALL + 1, SMALL, generator=rng, dtype=torch.float64)
    p = z.softmax(dim=1)
    return p[0], p[1:]


def two_tokens(rule: str) -> Tensor:
    """The first two tokens that speculative rounds of two drafts emit, [ROUNDS, 2]."""
    (p1, p2), (q1, q2) = language(1), language(2)
    u = keyed_uniforms(3, torch.arange(ROUNDS), torch.zeros(ROUNDS, dtype=torch.int64), 3)
    draw = keyed_uniforms(4, torch.arange(ROUNDS), torch.zeros(ROUNDS, dtype=torch.int64), 3)[..., 0]
    if rule == "probabilistic":
        d1 = sample(q1.expand(ROUNDS, -1), draw[:, 0])
        d2 = sample(q2[d1], draw[:, 1])
        draft_probs = torch.stack([q1.expand(ROUNDS, -1), q2[d1]], dim=1)
    else:
        d1 = q1.argmax().expand(ROUNDS)
        d2 = q2[d1].argmax(dim=1)
        draft_probs = None
    drafts = torch.stack([d1, d2], dim=1)
    target = torch.stack([p1.expand(ROUNDS, -1), p2[d1], p2[d2]], dim=1)
    if rule == "compare with the argmax":  # no rule for a temperature above 0: the control
        got = accept_greedy(drafts, target.argmax(dim=2))
    else:
        got = accept_sampled(drafts, draft_probs, target, u)
    # where one token came out, the next round draws the second one from the target
    following = sample(p2[got.emitted[:, 0]], draw[:, 2])
    second = torch.where(got.accepted > 0, got.emitted[:, 1], following)
    return torch.stack([got.emitted[:, 0], second], dim=1)


def chi_square_p(tokens: Tensor) -> float:
    """Probability of a fit this bad if the pairs followed the target's distribution."""
    p1, p2 = language(1)
    expected = (p1[:, None] * p2).flatten() * ROUNDS
    seen = torch.bincount(tokens[:, 0] * SMALL + tokens[:, 1], minlength=SMALL**2)
    assert expected.min() > 5  # or the chi-square approximation does not hold
    return float(stats.chisquare(seen.numpy(), expected.numpy()).pvalue)


@pytest.mark.parametrize("rule", ["probabilistic", "one-hot"])
def test_sampled_acceptance_emits_the_target_distribution(rule: str) -> None:
    assert chi_square_p(two_tokens(rule)) > ALPHA


def test_the_distribution_test_can_fail() -> None:
    assert chi_square_p(two_tokens("compare with the argmax")) < 1e-12


def test_one_hot_draft_probabilities_are_the_one_hot_rule() -> None:
    p1, _ = language(7)
    drafts = torch.randint(0, SMALL, (50, 2))
    target = p1.expand(50, 3, -1)
    u = keyed_uniforms(0, torch.arange(50), torch.arange(50), 3)
    one_hot = torch.nn.functional.one_hot(drafts, SMALL).double()
    first, second = (accept_sampled(drafts, q, target, u) for q in (None, one_hot))
    assert torch.equal(first.emitted, second.emitted)
    assert 0 < first.accepted.float().mean() < 2


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_no_temperature_is_greedy(temperature: float) -> None:
    z = torch.randn(30, 8, PADDED)
    z[::3, 2, 5] = z[::3, 2, :V].max(dim=1).values  # ties
    drafts = top1(z[:, :-1].reshape(-1, PADDED), V).view(30, 7)
    drafts[torch.arange(30), torch.arange(30) % 7] += 1
    probs = processed_distribution(z, V, temperature)
    u = keyed_uniforms(0, torch.arange(30), torch.arange(30), 8)
    want = accept_greedy(drafts, top1(z.view(-1, PADDED), V).view(30, 8))
    assert torch.equal(accept_sampled(drafts, None, probs, u).emitted, want.emitted)


def test_processed_distribution_cuts_top_k_then_top_p() -> None:
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    z = p.log()
    assert torch.allclose(processed_distribution(z, 4, 1.0), p.double())
    half = p.double() ** 2 / (p.double() ** 2).sum()
    assert torch.allclose(processed_distribution(z, 4, 0.5), half)
    cut = processed_distribution(z, 4, 1.0, top_k=2)
    assert torch.allclose(cut, torch.tensor([0, 4 / 7, 0, 3 / 7], dtype=torch.float64))
    assert torch.allclose(processed_distribution(z, 4, 1.0, top_p=0.5), cut)  # 0.4 alone does not reach 0.5
    assert processed_distribution(z, 4, 1.0, top_k=3, top_p=0.4).tolist() == [0, 1, 0, 0]
    # equals share a rank only by id: the lower one stays
    assert processed_distribution(torch.zeros(4), 4, 1.0, top_k=1).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": -1.0}, "temperature: expected a finite number of at least 0, got -1"),
        ({"temperature": float("nan")}, "temperature: expected a finite number of at least 0, got nan"),
        ({"temperature": float("inf"), "top_k": 2}, "temperature: expected a finite number"),
        ({"temperature": 1.0, "top_k": 0}, "top_k: expected at least 1, got 0"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top_p: expected in \(0, 1\], got 1.5"),
    ],
)
def test_processed_distribution_refuses(given: dict[str, float], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        processed_distribution(torch.zeros(4), 4, **given)


def test_samples_have_positive_probability_at_the_ends() -> None:
    p = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]], dtype=torch.float64).expand(2, -1)
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert sample(p, ends).tolist() == [1, 3]


def test_uniforms_depend_on_seed_request_and_position_alone() -> None:
    requests, positions = torch.tensor([4, 9]), torch.tensor([100, 17])
    u = keyed_uniforms(1, requests, positions, 8)
    assert torch.equal(u.flip(0), keyed_uniforms(1, requests.flip(0), positions.flip(0), 8))
    # row 3 of an anchor at 100 judges the position that row 0 of an anchor at 103 judges
    assert torch.equal(u[0, 3], keyed_uniforms(1, requests[:1], positions[:1] + 3, 1)[0, 0])
    assert not torch.equal(u, keyed_uniforms(2, requests, positions, 8))
    many = keyed_uniforms(0, torch.arange(200), torch.arange(200) * 3, 100).flatten()
    assert many.min() >= 0
    assert many.max() < 1
    assert len(many.unique()) == len(many)
    assert stats.kstest(many.numpy(), "uniform").pvalue > ALPHA


# Forced acceptance


def forced(mean_length: float, rounds: int) -> Synthetic:
    schedule = SyntheticSchedule(mean_length, 7)
    drafts, own = torch.full((rounds, 7), 1), torch.full((rounds, 8), 2)
    u = keyed_uniforms(0, torch.arange(rounds), torch.zeros(rounds, dtype=torch.int64), 1)[:, 0, 0]
    return synthetic_acceptance(schedule, drafts, own, u)


def test_a_whole_mean_forces_the_same_length_every_round() -> None:
    got = forced(4.0, 100)
    assert SyntheticSchedule(4.0, 7).rates == (1, 1, 1, 0, 0, 0, 0)
    assert got.emitted.tolist() == [[1, 1, 1, 2, -1, -1, -1, -1]] * 100


@pytest.mark.parametrize("mean_length", [1.0, 1.25, 3.7, 7.5, 8.0])
def test_a_fraction_is_right_on_average_with_the_least_variance(mean_length: float) -> None:
    rounds = 20_000
    lengths = forced(mean_length, rounds).accepted.double() + 1
    assert set(lengths.tolist()) <= {float(int(mean_length)), float(int(mean_length) + 1)}
    fraction = mean_length % 1
    error = (fraction * (1 - fraction) / rounds) ** 0.5
    assert abs(float(lengths.mean()) - mean_length) <= 4 * error  # 4 standard errors: 6e-5 by chance


def test_forced_acceptance_is_marked_and_of_its_own_type() -> None:
    got = forced(4.0, 1)
    assert got.performance_only is True
    assert Acceptance.performance_only is False
    assert not isinstance(got, Acceptance)


@pytest.mark.parametrize("verify", ["confidence", "ragged"])
def test_forced_acceptance_and_a_schedule_exclude_each_other(verify: str) -> None:
    with pytest.raises(ValueError, match=f"expected 'fixed', got '{verify}'"):
        SyntheticSchedule(4.0, 7, verify=verify)


@pytest.mark.parametrize("mean_length", [0.5, 8.5])
def test_a_mean_out_of_range_is_refused(mean_length: float) -> None:
    with pytest.raises(ValueError, match=f"mean_length: expected 1 to 8, got {mean_length}"):
        SyntheticSchedule(mean_length, 7)
