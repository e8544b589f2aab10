"""Choices as choices: gaps of selections and routings, and the oracle on another choice."""

import pytest
import torch

from audit.choices import boundary_gap, ranked, same_experts, score_noise, selection_gap

INF = float("inf")
SCORES = torch.tensor([[[5.0, 1.0, 4.0, 3.9, -2.0, INF, -INF]]])  # block 5 is forced, block 6 has no key
OWN = torch.tensor([[[0, 2, 5]]], dtype=torch.int32)


def gap(*other: int) -> float:
    return selection_gap(SCORES, OWN, torch.tensor([[list(other)]], dtype=torch.int32)).item()


def test_equal_selections_have_no_gap() -> None:
    assert gap(0, 2, 5) == 0.0


@pytest.mark.parametrize(
    ("other", "want"),
    [((0, 3, 5), 4.0 - 3.9), ((2, 3, 5), 5.0 - 3.9), ((1, 3, 5), 5.0 - 1.0), ((0, 4, 5), 4.0 + 2.0)],
)
def test_the_gap_is_the_widest_exchange(other, want) -> None:
    assert gap(*other) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        (0, 2, 3),  # the forced block is gone
        (0, 2, 6),  # a block without keys
        (2, 0, 5),  # not ascending
        (0, 2, -1),  # one fewer
        (0, 2, 2),  # one twice
        (-1, 0, 2),  # padding in front
        (0, 2, 7),  # no such block
    ],
)
def test_a_malformed_selection_is_infinitely_far(other) -> None:
    assert gap(*other) == INF


def test_score_noise_leaves_infinities_out() -> None:
    assert score_noise(SCORES + torch.tensor([0, 0.5, 0, 0, -0.25, 0, 0]), SCORES).item() == 0.5


def test_routing() -> None:
    scores = torch.tensor([[0.9, 0.5, 0.5, 0.1]])
    assert ranked(scores).tolist() == [[0, 1, 2, 3]]
    assert boundary_gap(scores, 2).item() == 0.0
    assert boundary_gap(scores, 3).item() == pytest.approx(0.4)
    assert boundary_gap(scores, 4).item() == INF
    other = torch.tensor([[0.5, 0.9, 0.4, 0.1]])
    assert same_experts(scores, other, 2).all()  # another order of the same set
    assert not same_experts(scores, other, 1).any()
