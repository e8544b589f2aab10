"""PTPC FP8: one scale per row, for weights and for activations."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mono.formats import PtpcFp8, e4m3, ptpc_fp8

ALL_CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Rows of very different magnitude, some zeros of either sign, any width."""
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 70))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    size = torch.exp2(torch.randint(-40, 40, (rows, 1), generator=rng).float())
    x = torch.randn(rows, width, generator=rng) * size
    x[torch.rand(rows, width, generator=rng) < 0.1] = draw(st.sampled_from([0.0, -0.0]))
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


def test_dequantise_of_typed_bytes() -> None:
    values = torch.tensor([[0x38, 0x40], [0xB8, 0x7E]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = PtpcFp8(values, torch.tensor([0.5, 3.0])).dequantise()
    assert got.dtype == torch.float32
    assert got.tolist() == [[0.5, 1.0], [-3.0, 1344.0]]


def test_dequantise_of_every_code() -> None:
    matrix = PtpcFp8(ALL_CODES.expand(2, 256), torch.tensor([1.0, 0.75]))
    got, once = matrix.dequantise(), e4m3.decode(ALL_CODES)
    assert got.isnan().nonzero().tolist() == [[0, 127], [0, 255], [1, 127], [1, 255]]
    assert torch.equal(got.nan_to_num(0.0), torch.stack((once, once * 0.75)).nan_to_num(0.0))


def test_weight_against_typed_literals() -> None:
    # row 0: scale 2, so 896 -> 448, 34 -> 17 -> 16 (a tie, to even), -2 -> -1. Row 1: zeros
    matrix = ptpc_fp8.quantise_weight(torch.tensor([[896.0, 34.0, -2.0], [0.0, -0.0, 0.0]]))
    assert matrix.scale.tolist() == [2.0, torch.tensor(1e-30).item()]
    assert matrix.values.view(torch.uint8).tolist() == [[0x7E, 0x58, 0xB8], [0x00, 0x80, 0x00]]
    assert matrix.dequantise().tolist() == [[896.0, 32.0, -2.0], [0.0, 0.0, 0.0]]


def test_rows_against_typed_literals() -> None:
    x8, scale = ptpc_fp8.quantise_rows(torch.tensor([[896.0, 34.0, -2.0], [0.0, -0.0, 0.0]]))
    assert scale.tolist() == [2.0, 1.0]
    assert x8.view(torch.uint8).tolist() == [[0x7E, 0x58, 0xB8], [0x00, 0x80, 0x00]]


def test_rows_divide_twice_and_never_multiply_by_a_reciprocal() -> None:
    """Two ties that only true division meets.

    57 / 3 = 19 goes to 20, but to 18 if the scale is 1344 * (1 / 448). 175 / 7 = 25 goes to 24, but to 26 if
    the quotient is 175 * (1 / 7).
    """
    x = torch.tensor([[1344.0, 57.0], [3136.0, 175.0]])
    x8, scale = ptpc_fp8.quantise_rows(x)
    assert scale.tolist() == [3.0, 7.0]
    assert e4m3.decode(x8).tolist() == [[448.0, 20.0], [448.0, 24.0]]
    assert e4m3.decode(ptpc_fp8.quantise_weight(x).values).tolist() == [[448.0, 20.0], [448.0, 24.0]]

    recip = x[0] / (x[0, 0] * torch.tensor(1 / 448)), x[1] * (1 / scale[1])
    assert [e4m3.decode(e4m3.encode(row))[1].item() for row in recip] == [18.0, 26.0]


@given(matrices())
def test_error_is_that_of_e4m3(x: Tensor) -> None:
    """Half a step of e4m3: 2^-4 of a normal value, 2^-10 scales of a subnormal one.

    The scale, the quotient and the product are each rounded to fp32: 2^-20 covers all three.
    """
    matrix = ptpc_fp8.quantise_weight(x)
    bound = torch.maximum(x.float().abs() * 2.0**-4, matrix.scale.unsqueeze(-1) * 2.0**-10) * (1 + 2.0**-20)
    assert ((matrix.dequantise() - x.float()).abs() <= bound).all()


@given(matrices())
def test_weight_and_rows_agree_on_every_row_that_is_not_zero(x: Tensor) -> None:
    matrix = ptpc_fp8.quantise_weight(x)
    x8, scale = ptpc_fp8.quantise_rows(x)
    zero = (x == 0).all(-1)
    assert torch.equal(x8.view(torch.uint8), matrix.values.view(torch.uint8))
    assert torch.equal(scale[~zero], matrix.scale[~zero])
    assert (scale[zero] == 1.0).all()


@given(matrices())
def test_quantising_again_keeps_every_code(x: Tensor) -> None:
    """The codes stay; 448 * scale / 448 is rounded twice, so the scale may move by one ulp."""
    once = ptpc_fp8.quantise_weight(x)
    twice = ptpc_fp8.quantise_weight(once.dequantise())
    zero = (x == 0).all(-1)
    # the sign of a product that underflows is kept, so zeros agree in sign as well
    assert torch.equal(twice.values.view(torch.uint8), once.values.view(torch.uint8))
    steps = twice.scale.view(torch.int32) - once.scale.view(torch.int32)
    assert (steps[~zero].abs() <= 1).all()


@given(matrices(), st.data())
def test_a_row_does_not_depend_on_its_neighbours(x: Tensor, data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(x) - 1))
    alone, together = ptpc_fp8.quantise_rows(x[i : i + 1]), ptpc_fp8.quantise_rows(x)
    assert torch.equal(alone[0].view(torch.uint8), together[0][i : i + 1].view(torch.uint8))
    assert torch.equal(alone[1], together[1][i : i + 1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_become_nan_and_leave_the_others(bad: float) -> None:
    x = torch.arange(1.0, 13.0).reshape(3, 4)
    clean8, clean = ptpc_fp8.quantise_rows(x)
    x[1, 2] = bad
    x8, scale = ptpc_fp8.quantise_rows(x)
    product = e4m3.decode(x8) * scale.unsqueeze(-1)
    assert product[1].isnan().all()
    assert torch.equal(x8[0::2].view(torch.uint8), clean8[0::2].view(torch.uint8))
    assert torch.equal(scale[0::2], clean[0::2])


def test_a_row_too_small_for_a_scale_is_a_zero_row() -> None:
    """1e-45 / 448 is zero in fp32; a scale of zero would turn the zeros of the row into 0 / 0."""
    x8, scale = ptpc_fp8.quantise_rows(torch.tensor([[1e-45, 0.0]]))
    assert scale.tolist() == [1.0]
    assert x8.view(torch.uint8).tolist() == [[0, 0]]


def test_weight_refuses_what_is_not_finite_with_its_count() -> None:
    w = torch.ones(3, 4)
    w[0, 1], w[2, 3] = math.nan, math.inf
    with pytest.raises(ValueError, match=r"ptpc_fp8: weight holds 2 non-finite values of 12, expected none"):
        ptpc_fp8.quantise_weight(w)


def test_constructor_names_the_field() -> None:
    values = ALL_CODES.reshape(4, 64)
    with pytest.raises(
        ValueError, match=r"ptpc_fp8: values has dtype torch.uint8, expected torch.float8_e4m3fn"
    ):
        PtpcFp8(values.view(torch.uint8), torch.ones(4))
    with pytest.raises(ValueError, match=r"ptpc_fp8: scale has dtype torch.float64, expected torch.float32"):
        PtpcFp8(values, torch.ones(4).double())
    with pytest.raises(ValueError, match=r"ptpc_fp8: scale has shape \[4, 1\], expected \[4\]"):
        PtpcFp8(values, torch.ones(4, 1))
