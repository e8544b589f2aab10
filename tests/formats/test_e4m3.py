"""e4m3: every code, every midpoint, and the ends of the range."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mono.formats import e4m3

ALL_CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)

# typed from OCP FP8 1.0, tables 1 and 2; the rest of the 256 follow from the formula in `exact`
ANCHORS = {
    0x00: 0.0,
    0x01: 0.001953125,  # 2^-9, the smallest subnormal
    0x07: 0.013671875,  # 7 * 2^-9, the largest subnormal
    0x08: 0.015625,  # 2^-6, the smallest normal
    0x30: 0.5,
    0x38: 1.0,
    0x3C: 1.5,
    0x40: 2.0,
    0x77: 240.0,
    0x78: 256.0,
    0x7E: 448.0,
    0xB8: -1.0,
    0xFE: -448.0,
}


def exact(code: int) -> Fraction:
    """The value of a finite code in units of 2^-9, by integers alone."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    steps = mantissa if exponent == 0 else (8 + mantissa) << (exponent - 1)
    return Fraction(-steps if code & 128 else steps, 512)


FINITE = [exact(code) for code in range(127)]  # not negative, ascending


def nearest(x: Fraction) -> int:
    """The code of the non-negative value nearest to x; the even code on a tie, 126 beyond the range."""
    return min(range(127), key=lambda code: (abs(FINITE[code] - x), code % 2))


def codes(x: list[float]) -> list[int]:
    return e4m3.encode(torch.tensor(x, dtype=torch.float32)).view(torch.uint8).tolist()


def test_decode_of_every_code() -> None:
    got = e4m3.decode(ALL_CODES)
    assert got.dtype == torch.float32
    for code, value in enumerate(got.tolist()):
        if code & 127 == 127:
            assert math.isnan(value), hex(code)
        else:
            assert Fraction(value) == exact(code), hex(code)
            assert math.copysign(1, value) == (-1 if code & 128 else 1), hex(code)


def test_decode_of_typed_codes() -> None:
    got = e4m3.decode(ALL_CODES).tolist()
    assert {code: got[code] for code in ANCHORS} == ANCHORS


def test_every_finite_code_encodes_to_itself() -> None:
    finite = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    values = e4m3.decode(finite.view(torch.float8_e4m3fn))
    assert torch.equal(e4m3.encode(values).view(torch.uint8), finite)


def test_every_midpoint_goes_to_the_even_code_and_its_neighbours_to_the_nearer() -> None:
    for low in range(126):
        midpoint = float((FINITE[low] + FINITE[low + 1]) / 2)
        below, above = (
            torch.nextafter(torch.tensor(midpoint), torch.tensor(end)).item() for end in (0.0, 500.0)
        )
        even = low if low % 2 == 0 else low + 1
        assert codes([below, midpoint, above]) == [low, even, low + 1], midpoint
        assert codes([-below, -midpoint, -above]) == [128 + low, 128 + even, 128 + low + 1], -midpoint


@pytest.mark.parametrize("x", [448.0, 449.0, 463.99, 464.0, 464.01, 480.0, 500.0, 1e30, 3.4e38, math.inf])
def test_saturates(x: float) -> None:
    assert codes([x, -x]) == [0x7E, 0xFE]


def test_nan_stays_nan() -> None:
    assert all(code & 127 == 127 for code in codes([math.nan, -math.nan]))


def test_zero_keeps_its_sign() -> None:
    # 2^-10 is the tie between zero and the smallest subnormal
    assert codes([0.0, -0.0, 2.0**-10, -(2.0**-10), 1e-40, -1e-40]) == [0, 128, 0, 128, 0, 128]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_takes_any_float(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -17.0], [300.0, 0.0]], dtype=dtype)
    got = e4m3.encode(x)
    assert (got.shape, got.dtype) == (x.shape, torch.float8_e4m3fn)
    assert e4m3.decode(got).tolist() == [[1.0, -16.0], [288.0, 0.0]]  # 17 and 300 are not on the grid


@given(st.floats(width=32, allow_nan=False))
def test_encode_is_the_nearest_value(x: float) -> None:
    (got,) = codes([x])
    magnitude = min(abs(x), 1000.0)  # an infinity has no Fraction, and 1000 is beyond the range too
    assert got & 127 == nearest(Fraction(magnitude))
    assert (got >= 128) == (math.copysign(1, x) < 0)


def test_decode_refuses_raw_bytes() -> None:
    with pytest.raises(ValueError, match=r"e4m3: codes has dtype torch.uint8, expected torch.float8_e4m3fn"):
        e4m3.decode(torch.zeros(2, dtype=torch.uint8))
