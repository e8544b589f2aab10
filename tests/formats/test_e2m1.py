"""e2m1: the 16 codes, the midpoints between them, and the order of two in a byte."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mono.formats import e2m1

# typed from OCP MX 1.0, section 5.3.3
TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
ALL_CODES = torch.arange(16, dtype=torch.uint8)


def codes(x: list[float]) -> list[int]:
    return e2m1.encode(torch.tensor(x, dtype=torch.float32)).tolist()


def bits(values: list[float]) -> list[str]:
    """As hexadecimal text, so that -0 differs from 0."""
    return [value.hex() for value in values]


def test_every_code() -> None:
    got = e2m1.decode(ALL_CODES)
    assert got.dtype == torch.float32
    assert bits(got.tolist()) == bits(TABLE)
    assert bits(list(e2m1.VALUES)) == bits(TABLE)


def test_every_code_encodes_to_itself() -> None:
    assert codes(TABLE) == list(range(16))


@pytest.mark.parametrize(
    ("midpoint", "low", "even"),
    [(0.25, 0, 0), (0.75, 1, 2), (1.25, 2, 2), (1.75, 3, 4), (2.5, 4, 4), (3.5, 5, 6), (5.0, 6, 6)],
)
def test_midpoints_go_to_the_even_code_and_their_neighbours_to_the_nearer(midpoint, low, even) -> None:
    below, above = (torch.nextafter(torch.tensor(midpoint), torch.tensor(end)).item() for end in (0.0, 9.0))
    assert codes([below, midpoint, above]) == [low, even, low + 1]
    assert codes([-below, -midpoint, -above]) == [8 + low, 8 + even, 8 + low + 1]


def test_saturates() -> None:
    assert codes([6.01, 7.0, 8.0, 1e30, math.inf]) == [7] * 5
    assert codes([-6.01, -7.0, -8.0, -1e30, -math.inf]) == [15] * 5


def test_zero_keeps_its_sign() -> None:
    assert codes([0.0, -0.0, 0.1, -0.1, 1e-45, -1e-45]) == [0, 8, 0, 8, 0, 8]


def test_nan_is_refused_with_its_count() -> None:
    with pytest.raises(ValueError, match=r"e2m1: 2 NaN of 4 values"):
        e2m1.encode(torch.tensor([1.0, math.nan, 2.0, math.nan]))


@given(st.floats(width=32, allow_nan=False))
def test_encode_is_the_nearest_value(x: float) -> None:
    magnitude = Fraction(min(abs(x), 100.0))
    nearest = min(range(8), key=lambda code: (abs(Fraction(TABLE[code]) - magnitude), code % 2))
    assert codes([x]) == [nearest + (8 if math.copysign(1, x) < 0 else 0)]


def test_low_nibble_is_the_even_k() -> None:
    byte = torch.tensor([0x21], dtype=torch.uint8)
    assert e2m1.unpack(byte).tolist() == [1, 2]
    assert e2m1.pack(torch.tensor([1, 2], dtype=torch.uint8)).tolist() == [0x21]
    # with x = (1, 10): 0.5 + 10; the other order would be 1 + 5
    assert (e2m1.decode(e2m1.unpack(byte)) @ torch.tensor([1.0, 10.0])).item() == 10.5


def test_unpack_of_every_byte() -> None:
    got = e2m1.unpack(torch.arange(256, dtype=torch.uint8).unsqueeze(-1))
    assert got.tolist() == [[byte % 16, byte // 16] for byte in range(256)]
    assert e2m1.pack(got).flatten().tolist() == list(range(256))


def test_pack_keeps_leading_dimensions_and_takes_strided_codes() -> None:
    codes = torch.arange(2 * 3 * 8, dtype=torch.uint8).reshape(2, 3, 8) % 16
    packed = e2m1.pack(codes.transpose(0, 1))
    assert packed.shape == (3, 2, 4)
    assert torch.equal(e2m1.unpack(packed), codes.transpose(0, 1))


def test_pack_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="K = 3, expected an even number"):
        e2m1.pack(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="1 codes exceed 15"):
        e2m1.pack(torch.tensor([3, 16], dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"dtype torch.int64, expected torch.uint8"):
        e2m1.pack(torch.tensor([3, 1]))
