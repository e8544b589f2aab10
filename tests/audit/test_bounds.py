"""The bounds against tables computed apart from this code."""

import math

import pytest

from audit.bounds import clustered, interval, more_often, steps_needed, upper

TABLE = [  # events, trials, one-sided upper, two-sided low and high, in percent
    (0, 56, 5.21, 0.0, 6.38),
    (0, 448, 0.67, 0.0, 0.82),
    (8, 448, 3.20, 0.77, 3.49),
    (0, 299, 1.00, 0.0, 1.23),
    (0, 1000, 0.30, 0.0, 0.37),
    (0, 3000, 0.10, 0.0, 0.12),
]


@pytest.mark.parametrize(("events", "trials", "one_sided", "low", "high"), TABLE)
def test_bounds_are_clopper_pearson(events, trials, one_sided, low, high) -> None:
    # the table is rounded to two decimals of a percent
    assert round(100 * upper(events, trials), 2) == pytest.approx(one_sided)
    both = interval(events, trials)
    assert round(100 * both.low, 2) == pytest.approx(low)
    assert round(100 * both.high, 2) == pytest.approx(high)


def test_without_events_the_bound_is_a_power() -> None:
    assert upper(0, 56) == pytest.approx(1 - 0.05 ** (1 / 56), rel=1e-12)


@pytest.mark.parametrize(
    ("rate", "needed"),
    [
        (0.05, [59, 93, 124, 153]),
        (0.02, [149, 236, 313, 386]),
        (0.01, [299, 473, 628, 773]),
        (0.005, [598, 947, 1258, 1549]),
        (0.001, [2995, 4742, 6294, 7752]),
    ],
)
def test_steps_needed(rate, needed) -> None:
    assert [steps_needed(rate, k) for k in range(4)] == needed
    for k, n in enumerate(needed):
        assert upper(k, n) <= rate < upper(k, n - 1)


def test_everything_failed() -> None:
    assert upper(5, 5) == 1.0
    assert interval(5, 5).high == 1.0


@pytest.mark.parametrize(("events", "trials"), [(0, 0), (3, 2), (-1, 4), (math.nan, 4)])
def test_impossible_counts_are_refused(events, trials) -> None:
    with pytest.raises(ValueError, match="expected 0 <= events <= trials"):
        upper(events, trials)


def test_clusters_without_events_keep_their_trials() -> None:
    found = clustered([0] * 8, [7] * 8)
    assert (found.trials, found.effective, found.clusters) == (56, 56.0, 8)
    assert found.upper_clusters == pytest.approx(1 - 0.05 ** (1 / 8))


def test_events_in_one_cluster_are_worth_one() -> None:
    # fully dependent: all trials of a cluster agree, so a cluster is one trial
    found = clustered([7, 0, 0, 0, 0, 0, 0, 0], [7] * 8)
    assert found.effective == pytest.approx(8.0)
    assert found.clusters_hit == 1
    assert found.upper_effective > found.upper


def test_spread_events_are_independent() -> None:
    assert clustered([1] * 8, [7] * 8).effective == pytest.approx(56.0)


def test_more_often() -> None:
    assert more_often(8, 448, 8, 448) > 0.4
    assert more_often(40, 448, 8, 448) < 1e-4
