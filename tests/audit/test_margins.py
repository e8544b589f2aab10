"""Flip classes, noise and bias of the margin."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from audit.margins import (
    Noise,
    classify,
    expected_flips,
    margin_change,
    margins,
    noise_of,
    robust_sigma,
    shift,
    size,
    size_where_changed,
)

NOISE = Noise(sigma=0.01, size=0.05, largest=0.3, changes=np.array([-0.3, 0.0, 0.1]))
ULP = 2.0**-20


@pytest.mark.parametrize(
    ("gap", "want"), [(0.0, "T0"), (ULP, "T1"), (2 * ULP, "T2"), (1.2, "T2"), (1.2001, "T3")]
)
def test_classes(gap, want) -> None:
    assert classify(gap, ULP, NOISE) == want


def test_the_limit_is_four_times_the_largest_seen() -> None:
    assert NOISE.limit == pytest.approx(1.2)
    assert replace(NOISE, largest=0.01).limit == pytest.approx(0.04)


def test_margins_take_the_lowest_id_on_a_tie_and_no_padded_column() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 99.0], [0.0, -1.0, 16.5, 99.0]])
    found = margins(logits, vocab=3)
    assert found.first.tolist() == [1, 2]
    assert found.second.tolist() == [2, 0]
    assert found.gap.tolist() == [0.0, 16.5]
    assert found.ulp[1].item() == 2.0**-19  # fp32 at 16.5


def test_change_follows_the_reference_pair() -> None:
    reference = torch.tensor([[1.0, 3.0, 2.5]])
    other = torch.tensor([[9.0, 3.0, 2.75]])
    assert margin_change(other, margins(reference, 3)).item() == pytest.approx(-0.25)
    assert margin_change(torch.full((1, 3), float("nan")), margins(reference, 3)).isnan().all()


def test_sigma_ignores_a_wild_row() -> None:
    change = np.random.default_rng(0).normal(0, 0.05, 10_000)
    change[0] = 1e6
    assert robust_sigma(change) == pytest.approx(0.05, rel=0.05)
    assert noise_of([change, change * 2]).sigma == pytest.approx(0.1, rel=0.05)
    assert noise_of([]).limit == 0.0


def test_a_small_bias_shows_where_no_row_flips() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.05, 448)
    assert shift(noise).sigmas < 4
    assert shift(noise + 0.02).sigmas > 4
    assert shift(np.full(10, 0.5)).sigmas == float("inf")
    assert shift(np.zeros(10)).sigmas == 0.0


def test_expected_flips_follow_the_measured_noise() -> None:
    # a margin of 0 flips under two of the three changes, one of 0.3 under one, a larger one under none
    assert expected_flips(np.array([0.0]), NOISE) == pytest.approx(2 / 3)
    assert expected_flips(np.array([0.0, 0.3, 0.31]), NOISE) == pytest.approx(1.0)
    assert expected_flips(np.array([0.0]), noise_of([])) == 0.0


def test_size_counts_rare_changes_and_never_hides_a_nan() -> None:
    change = np.zeros(1000)
    change[:100] = 0.5
    assert robust_sigma(change) == 0.0
    assert size(change) == pytest.approx(0.5 * 0.1**0.5)
    change[3] = float("nan")
    assert size(change) == float("inf")


def test_one_wild_row_does_not_make_the_size() -> None:
    change = np.random.default_rng(0).normal(0, 0.05, 1000)
    sizes = size(change), size_where_changed(change)
    change[0] = 100.0
    assert (size(change), size_where_changed(change)) == pytest.approx(sizes, rel=0.05)


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_size_where_changed_does_not_depend_on_how_many_rows_do(share) -> None:
    change = np.zeros(1000)
    change[: int(1000 * share)] = -0.5
    assert size_where_changed(change) == pytest.approx(0.5)
    assert size_where_changed(np.zeros(10)) == size_where_changed(np.zeros(0)) == 0.0
