"""The reference's three ways to sum: same rounding points, other orders."""

import pytest
import torch

from mono.reference.numerics import FLOAT64, NATIVE, reordered

ALL = [NATIVE, FLOAT64, reordered(2), reordered(3)]


@pytest.mark.parametrize("numerics", ALL, ids=lambda n: n.name)
def test_sums_agree_within_fp32_summation(numerics) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 300), torch.randn(7, 300)
    exact = a.double() @ b.double().T
    # a sum of n fp32 terms is off by at most n ulp of the sum of magnitudes, in any order
    bound = 300 * 2.0**-24 * (a.double().abs() @ b.double().abs().T) + 2.0**-24 * exact.abs()
    assert ((numerics.matmul(a, b).double() - exact).abs() <= bound).all()
    total = numerics.sum(a, 1).double()
    assert ((total - a.double().sum(1)).abs() <= 300 * 2.0**-24 * a.double().abs().sum(1)).all()


def test_orders_differ_from_one_another() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(16, 999), torch.randn(64, 999)
    results = [n.matmul(a, b) for n in ALL]
    for i, one in enumerate(results):
        for other in results[:i]:
            assert not torch.equal(one, other)


def test_float64_sees_what_fp32_loses() -> None:
    a = torch.tensor([[2.0**30, 1.0, -(2.0**30)]])
    assert FLOAT64.matmul(a, torch.ones(1, 3)).item() == 1.0
    assert FLOAT64.sum(a, 1).item() == 1.0


@pytest.mark.parametrize("numerics", ALL, ids=lambda n: n.name)
def test_a_row_does_not_depend_on_its_neighbours(numerics) -> None:
    torch.manual_seed(1)
    a, b = torch.randn(16, 777), torch.randn(250, 777)
    together = numerics.matmul(a, b)
    for rows in (1, 3, 8):
        for first in range(0, 16 - rows, rows):
            alone = numerics.matmul(a[first : first + rows], b)
            assert torch.equal(alone, together[first : first + rows])


@pytest.mark.parametrize("numerics", ALL, ids=lambda n: n.name)
def test_nothing_to_sum_is_zero(numerics) -> None:
    assert numerics.matmul(torch.ones(2, 0), torch.ones(3, 0)).tolist() == [[0.0] * 3] * 2
    assert numerics.sum(torch.ones(2, 0), 1).tolist() == [0.0, 0.0]


def test_one_chunk_is_no_other_order() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        reordered(1)
