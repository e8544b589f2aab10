"""Errors against their floor: worst row, mean, experts, near ties."""

import torch

from audit.floor import FACTOR, Ledger, RowAt

ROWS = 256  # one event among fewer than 64 rows is no news, see Ledger
AT = [RowAt("prompt", 100 + i, i, 16) for i in range(ROWS)]
FLOOR = ("reference", "reordered/2")


def judged(fast, floor=0.01, event=0.01, **options):
    ledger = Ledger(FLOOR)
    fast = torch.as_tensor(fast, dtype=torch.float64).expand(ROWS)
    errors = {"fast": fast, "reference": torch.full((ROWS,), floor), "reordered/2": torch.zeros(ROWS)}
    ledger.add("slot", "partial", errors, torch.full((ROWS,), event, dtype=torch.float64), AT, **options)
    (found,) = ledger.judged()
    return found


def test_the_worst_row_is_named_with_its_place() -> None:
    fast = torch.zeros(ROWS)
    fast[11] = 0.05
    found = judged(fast)
    assert found.worst == fast[11].item()
    assert found.at == AT[11]
    assert found.ratio > FACTOR
    assert "prompt, position 111, row 11 at width 16" in found.reasons[0]


def test_the_limit_is_inclusive() -> None:
    fast = torch.zeros(ROWS, dtype=torch.float64)
    fast[0] = 0.04
    assert not judged(fast).reasons
    fast[0] = 0.041
    assert judged(fast).reasons


def test_a_floor_of_zero_falls_back_to_one_event() -> None:
    fast = torch.zeros(ROWS)
    fast[0] = 0.02
    assert not judged(fast, floor=0.0, event=0.01).reasons
    assert judged(fast, floor=0.0, event=0.001).reasons


def test_where_nothing_may_differ_nothing_may_differ() -> None:
    fast = torch.zeros(ROWS)
    assert not judged(fast, floor=0.0, event=0.0).reasons
    fast[3] = 1e-12
    assert judged(fast, floor=0.0, event=0.0).ratio == float("inf")


def test_an_infinite_error_never_passes() -> None:
    fast = torch.zeros(ROWS)
    fast[3] = float("inf")
    assert judged(fast, floor=float("inf")).reasons


def test_a_small_error_on_every_row_shows_in_the_mean() -> None:
    found = judged(0.002, floor=0.0, event=0.01)
    assert found.ratio < FACTOR
    assert found.mean_ratio > FACTOR
    assert "mean error" in found.reasons[0]


def test_one_expert_cannot_hide_among_many() -> None:
    fast = torch.zeros(ROWS)
    fast[:64] = 0.002  # 0.0005 over all rows
    experts = torch.arange(ROWS)[:, None] // 64
    assert not judged(fast, floor=0.0, event=0.01).reasons
    found = judged(fast, floor=0.0, event=0.01, experts=experts)
    assert found.expert == 0
    assert "expert 0" in found.reasons[0]


def test_an_explained_flip_is_judged_behind_the_choice() -> None:
    fast, behind, gap = torch.zeros(ROWS), torch.zeros(ROWS), torch.zeros(ROWS)
    fast[2], gap[2] = 0.9, 3e-6
    found = judged(fast, behind=behind, gap=gap, noise=1e-6)
    assert (found.explained, found.beyond) == (1, 0)
    assert not found.reasons
    behind[2] = 0.9  # and nothing hides behind it
    assert "worst row's error" in judged(fast, behind=behind, gap=gap, noise=1e-6).reasons[0]


def test_a_flip_beyond_the_noise_is_an_error() -> None:
    gap = torch.zeros(ROWS)
    gap[2] = 5e-6
    found = judged(torch.zeros(ROWS), behind=torch.zeros(ROWS), gap=gap, noise=1e-6)
    assert (found.explained, found.beyond) == (0, 1)
    assert "chose differently" in found.reasons[0]
    assert found.gap_at == AT[2]


def test_a_floor_arm_that_chose_otherwise_is_no_measure_of_noise() -> None:
    ledger = Ledger(FLOOR)
    nan, zero = torch.full((ROWS,), float("nan")), torch.zeros(ROWS)
    fast = zero.clone()
    fast[0] = 0.05
    ledger.add("slot", "partial", {"fast": fast, "reference": nan, "reordered/2": zero}, zero + 0.01, AT)
    assert ledger.judged()[0].floor == 0.0


def test_experts_that_were_chosen_are_counted() -> None:
    ledger = Ledger(FLOOR)
    zero = torch.zeros(ROWS)
    errors = dict.fromkeys(("fast", *FLOOR), zero)
    ledger.add("slot", "partial", errors, zero, AT, experts=torch.tensor([[0, 4]] * ROWS))
    assert ledger.expert_rows("slot") == {0: ROWS, 4: ROWS}
    assert ledger.places == {"slot"}


def test_behind_a_near_tie_the_mean_is_judged_and_the_worst_row_only_if_it_is_not_finite() -> None:
    fast = torch.zeros(ROWS)
    fast[7] = 0.09
    assert judged(fast).reasons
    assert not judged(fast, tied=True).reasons
    assert "mean error" in judged(torch.full((ROWS,), 0.09), tied=True).reasons[0]
    fast[7] = float("inf")
    assert judged(fast, tied=True).reasons
