"""Row measures: worst row, NaN, zero rows, ulps."""

import pytest
import torch

from audit.measures import kl_divergence, least_error, row_error, row_ulps

INF = float("inf")


def test_one_bad_row_is_its_own_number() -> None:
    want = torch.ones(512, 16)
    got = want.clone()
    got[300] = 0
    error = row_error(got, want)
    assert error[300] == 1.0
    assert error.sum() == 1.0


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_not_finite_is_never_equal(bad) -> None:
    x = torch.ones(3, 4)
    x[1, 2] = bad
    assert row_error(x, x).tolist() == [0.0, INF, 0.0]
    assert row_ulps(x, x).tolist() == [0, -1, 0]
    assert kl_divergence(x, x).tolist() == [0.0, INF, 0.0]


def test_zero_rows() -> None:
    zero, one = torch.zeros(1, 4), torch.ones(1, 4)
    assert row_error(zero, zero).item() == 0.0
    assert row_error(one, zero).item() == INF


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\] and \[2, 4\]"):
        row_error(torch.zeros(2, 3), torch.zeros(2, 4))


def test_ulps_cross_zero() -> None:
    tiny = torch.tensor([[1]], dtype=torch.int16).view(torch.bfloat16)
    assert row_ulps(tiny, -tiny).item() == 2
    assert row_ulps(torch.zeros(1, 1), -torch.zeros(1, 1)).item() == 0
    x = torch.tensor([[1.0]])
    assert row_ulps(torch.nextafter(x, 2 * x), x).item() == 1


def test_least_error_is_one_flip() -> None:
    want = torch.tensor([[3.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    got = want.clone()
    got[0, 0] = 3.0 + 2.0**-6  # bf16's next value above 3
    least = least_error(want, mantissa_bits=7)
    assert least[0].item() == pytest.approx(row_error(got, want)[0].item())
    assert least[1].item() == 0.0


def test_kl_of_a_known_pair() -> None:
    p, q = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.5]])
    want = 0.25 * torch.tensor(0.5).log() + 0.75 * torch.tensor(1.5).log()
    assert kl_divergence(q.log(), p.log()).item() == pytest.approx(want.item(), rel=1e-6)
