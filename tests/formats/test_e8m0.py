"""E8M0: all 256 bytes, and the two rules that choose one."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mono.formats import e8m0

ALL_CODES = torch.arange(256, dtype=torch.uint8)

# typed from OCP MX 1.0, section 5.4.1; the rest of the 256 are 2^(c - 127) by `math.ldexp`, which is exact
ANCHORS = {
    0: 5.877471754111438e-39,
    1: 1.1754943508222875e-38,
    7: 7.52316384526264e-37,
    119: 0.00390625,
    126: 0.5,
    127: 1.0,
    128: 2.0,
    137: 1024.0,
    247: 1.329227995784916e36,
    254: 1.7014118346046923e38,
}


def test_decode_of_every_byte() -> None:
    got = e8m0.decode(ALL_CODES)
    assert got.dtype == torch.float32
    assert got[:255].tolist() == [math.ldexp(1.0, code - 127) for code in range(255)]
    assert math.isnan(got[255])


def test_decode_of_typed_bytes() -> None:
    got = e8m0.decode(ALL_CODES).tolist()
    assert {code: got[code] for code in ANCHORS} == ANCHORS


def test_inverse_of_every_byte() -> None:
    got = e8m0.decode_inverse(ALL_CODES)
    assert got[:255].tolist() == [math.ldexp(1.0, 127 - code) for code in range(255)]
    assert math.isnan(got[255])


def test_ceil_keeps_powers_of_two_and_rounds_up_what_is_past_them() -> None:
    powers = e8m0.decode(ALL_CODES[:255])
    past = torch.nextafter(powers, torch.tensor(math.inf))
    before = torch.nextafter(powers, torch.tensor(0.0))
    assert e8m0.encode_ceil(powers).tolist() == [1, *range(1, 255)]
    assert e8m0.encode_ceil(past).tolist() == [1, *range(2, 255), 254]
    assert e8m0.encode_ceil(before).tolist() == [1, 1, *range(2, 255)]


def test_ceil_at_the_ends() -> None:
    ends = torch.tensor([0.0, 1e-45, 3.4028234663852886e38, math.inf, math.nan])
    assert e8m0.encode_ceil(ends).tolist() == [1, 1, 254, 254, 254]


def even_by_fractions(amax: Fraction) -> int:
    """The "even" rule in exact arithmetic, for positive amax."""
    n = -200
    while Fraction(2) ** (n + 1) <= amax:
        n += 1
    if amax >= Fraction(7, 4) * Fraction(2) ** n:
        n += 1
    return min(max(n - 2 + 127, 0), 254)


@given(st.floats(2.0**-126, 3.4028234663852886e38, width=32))
def test_even_is_the_rule_in_exact_arithmetic(amax: float) -> None:
    assert e8m0.encode_even(torch.tensor(amax)).item() == even_by_fractions(Fraction(amax))


def test_even_at_every_boundary() -> None:
    for n in range(-126, 128):
        boundary = torch.tensor(math.ldexp(1.75, n))
        below = torch.nextafter(boundary, torch.tensor(0.0))
        got = e8m0.encode_even(torch.stack((below, boundary))).tolist()
        assert got == [max(n + 125, 0), max(n + 126, 0)], n


def test_even_of_zero_and_subnormals() -> None:
    assert e8m0.encode_even(torch.tensor([0.0, 1e-45, 1.1754942e-38])).tolist() == [0, 0, 0]


def test_decode_refuses_another_dtype() -> None:
    with pytest.raises(ValueError, match=r"e8m0: codes has dtype torch.int32, expected torch.uint8"):
        e8m0.decode(ALL_CODES.int())
