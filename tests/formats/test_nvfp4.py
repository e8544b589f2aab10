"""NVFP4: two levels of scale, and two conventions that must not be mixed up."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mono.formats import Nvfp4, e2m1, e4m3, nvfp4

CONVENTIONS = ["compressed-tensors", "modelopt"]

# typed from OCP MX 1.0, section 5.3.3
TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """One matrix with rows of unequal magnitude, some zeros of either sign."""
    rows, groups = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    size = torch.exp2(torch.randint(-6, 7, (rows, groups, 1), generator=rng) + draw(st.integers(-100, 100)))
    x = torch.randn(rows, groups, 16, generator=rng) * size
    x[torch.rand(x.shape, generator=rng) < 0.1] = draw(st.sampled_from([0.0, -0.0]))
    return x.flatten(1).to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


def typed(convention: str, global_scale: float) -> Nvfp4:
    """Two blocks of (0.5, 1) under 2 and 0.5."""
    packed = torch.full((1, 16), 0x21, dtype=torch.uint8)
    scale = torch.tensor([[0x40, 0x30]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    return Nvfp4(packed, scale, torch.tensor(global_scale), convention)


def test_compressed_tensors_divides_by_the_global_scale() -> None:
    got = typed("compressed-tensors", 8.0).dequantise()
    assert got.tolist() == [[0.125, 0.25] * 8 + [0.03125, 0.0625] * 8]


def test_modelopt_multiplies_by_the_global_scale() -> None:
    assert typed("modelopt", 8.0).dequantise().tolist() == [[8.0, 16.0] * 8 + [2.0, 4.0] * 8]


def test_a_mix_up_is_off_by_the_square_of_the_global_scale() -> None:
    right, wrong = (typed(convention, 8.0).dequantise() for convention in CONVENTIONS)
    assert torch.equal(wrong, 64 * right)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_every_code_under_every_scale_code(convention: str) -> None:
    """4,096 products. Code times scale is exact, so dividing or multiplying by 3 is the one rounding."""
    packed = e2m1.pack(torch.arange(16, dtype=torch.uint8).expand(256, 16))
    scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(-1)
    got = Nvfp4(packed, scale, torch.tensor(3.0), convention).dequantise()
    assert got.dtype == torch.float32

    exact = torch.tensor(TABLE, dtype=torch.float64) * e4m3.decode(scale).double()
    want = (exact / 3.0 if convention == "compressed-tensors" else exact * 3.0).float()
    assert got.isnan().any(-1).nonzero().flatten().tolist() == [127, 255]
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.0), want.nan_to_num(0.0))
    assert torch.equal(got.signbit()[:127], want.signbit()[:127])


def test_global_scales_per_expert_and_per_row() -> None:
    packed = torch.full((2, 3, 8), 0x22, dtype=torch.uint8)
    scale = torch.ones(2, 3, 1).to(torch.float8_e4m3fn)
    per_expert = Nvfp4(packed, scale, torch.tensor([2.0, 4.0]), "modelopt")
    assert per_expert.dequantise()[:, :, 0].tolist() == [[2.0] * 3, [4.0] * 3]
    assert per_expert[1].global_scale.item() == 4.0
    assert per_expert[1, 0:2].dequantise()[:, 0].tolist() == [4.0, 4.0]

    per_row = Nvfp4(packed[0], scale[0], torch.tensor([2.0, 4.0, 8.0]), "compressed-tensors")
    assert per_row.dequantise()[:, 0].tolist() == [0.5, 0.25, 0.125]
    assert per_row.rows(1, 3).dequantise()[:, 0].tolist() == [0.25, 0.125]


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_quantise_against_typed_literals(convention: str) -> None:
    # the largest value is 448 * 6 / 4, so the unit is 1/4; scales 672 / 6 * 4 = 448 and 1.5 / 6 * 4 = 1
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([672.0, -336.0, 27.9])  # under 112: 6, -3, 0.249
    x[0, 16:20] = torch.tensor([1.5, -1.25, 0.4375, -0.0])  # under 0.25: 6, -5 (a tie), 1.75 (a tie), -0
    matrix = nvfp4.quantise(x, convention)
    assert matrix.global_scale.item() == {"compressed-tensors": 4.0, "modelopt": 0.25}[convention]
    assert e4m3.decode(matrix.scale).tolist() == [[448.0, 1.0]]
    assert matrix.packed.tolist() == [[0xD7, 0x00, 0, 0, 0, 0, 0, 0, 0xE7, 0x84, 0, 0, 0, 0, 0, 0]]
    assert matrix.dequantise()[0, :3].tolist() == [672.0, -336.0, 0.0]
    assert matrix.dequantise()[0, 16:20].tolist() == [1.5, -1.0, 0.5, 0.0]


@given(matrices(), st.sampled_from(CONVENTIONS))
def test_error_is_that_of_both_roundings(x: Tensor, convention: str) -> None:
    """With step = scale * unit, half a step of e2m1: 1/4 below 2, 1/2 below 4, 1 below 6.

    An e4m3 scale may be rounded down by 2^-4 of itself, so up to 6 * (1 + 2^-4) = 6.4 arrives and saturates:
    still within 1. The fp32 roundings of unit, step and quotient: 2^-20 of the value covers them.
    """
    matrix = nvfp4.quantise(x, convention)
    unit = matrix.global_scale.double()
    unit = 1 / unit if convention == "compressed-tensors" else unit
    step = (e4m3.decode(matrix.scale).double() * unit).repeat_interleave(16, dim=-1)
    scaled = x.double().abs() / step
    assert (scaled <= 6.4).all()
    half_step = torch.where(scaled < 2, 0.25, torch.where(scaled < 4, 0.5, 1.0)) * step
    error = (matrix.dequantise().double() - x.double()).abs()
    assert (error <= half_step + x.double().abs() * 2.0**-20).all()


@given(matrices())
def test_conventions_store_the_same_matrix(x: Tensor) -> None:
    """One global scale is the inverse of the other up to fp32 rounding, which can move a scale near a tie."""
    divides, multiplies = (nvfp4.quantise(x, convention) for convention in CONVENTIONS)
    assert divides.global_scale.item() * multiplies.global_scale.item() == pytest.approx(1, rel=2.0**-22)
    steps = divides.scale.view(torch.uint8).int() - multiplies.scale.view(torch.uint8).int()
    assert (steps.abs() <= 1).all()


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_zero_matrix_has_unit_global_scale(convention: str) -> None:
    matrix = nvfp4.quantise(torch.zeros(2, 32), convention)
    assert matrix.global_scale.item() == 1.0
    assert (matrix.dequantise() == 0).all()


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_small_block_is_not_lost_to_a_zero_scale(convention: str) -> None:
    """Beside 2688, a block of 2^-8 wants the scale 2^-8 / 6, which e4m3 rounds to zero; the floor is 2^-9."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 2688.0, 2.0**-8
    matrix = nvfp4.quantise(x, convention)
    assert e4m3.decode(matrix.scale).tolist() == [[448.0, 2.0**-9]]
    assert matrix.dequantise()[0, 16].item() == 2.0**-8


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-34, 3e38])
def test_extreme_magnitudes_stay_finite(convention: str, size: float) -> None:
    x = torch.full((1, 16), size)
    matrix = nvfp4.quantise(x, convention)
    assert matrix.global_scale.isfinite()
    assert matrix.global_scale > 0
    # below 2688 * 2^-126 = 3.2e-35 the unit is at its floor, and what is small beside it becomes zero
    assert matrix.dequantise()[0, 0].item() == pytest.approx(size, rel=2.0**-4, abs=2.0**-137)


def test_each_matrix_of_a_table_has_its_own_global_scale() -> None:
    x = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(4)) * torch.tensor(
        [1.0, 8.0, 64.0]
    ).reshape(3, 1, 1)
    table = nvfp4.quantise(x, "modelopt")
    assert table.global_scale.shape == (3,)
    for e in range(3):
        alone = nvfp4.quantise(x[e], "modelopt")
        assert torch.equal(alone.dequantise(), table[e].dequantise())
        assert torch.equal(alone.packed, table[e].packed)


def test_refuses_what_is_not_finite_with_its_count() -> None:
    x = torch.ones(2, 32)
    x[0, 3], x[1, 5] = math.nan, math.inf
    with pytest.raises(ValueError, match=r"nvfp4: x holds 2 non-finite values of 64, expected none"):
        nvfp4.quantise(x, "modelopt")


def test_constructor_and_quantiser_name_the_field() -> None:
    packed, scale = torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 2).to(torch.float8_e4m3fn)
    one = torch.tensor(1.0)
    with pytest.raises(ValueError, match=r"nvfp4: convention is 'nvidia', expected one of"):
        Nvfp4(packed, scale, one, "nvidia")
    with pytest.raises(ValueError, match=r"nvfp4: convention is 'nvidia', expected one of"):
        nvfp4.quantise(torch.zeros(2, 32), "nvidia")
    with pytest.raises(ValueError, match=r"nvfp4: packed has dtype torch.int8, expected torch.uint8"):
        Nvfp4(packed.view(torch.int8), scale, one, "modelopt")
    with pytest.raises(ValueError, match=r"nvfp4: scale has dtype torch.uint8, expected torch.float8_e4m3fn"):
        Nvfp4(packed, scale.view(torch.uint8), one, "modelopt")
    with pytest.raises(ValueError, match=r"nvfp4: scale has shape \[4, 1\], expected \[4, 2\]: one scale"):
        Nvfp4(packed, scale[:, :1], one, "modelopt")
    with pytest.raises(ValueError, match=r"nvfp4: global_scale has dtype torch.float64, expected"):
        Nvfp4(packed, scale, one.double(), "modelopt")
    with pytest.raises(ValueError, match=r"nvfp4: global_scale has shape \[1\], expected \[4\]"):
        Nvfp4(packed, scale, torch.ones(1), "modelopt")
    with pytest.raises(ValueError, match=r"nvfp4: packed has K = 24, expected a multiple of .* 16"):
        Nvfp4(packed[:, :12], scale[:, :1], one, "modelopt")
    with pytest.raises(ValueError, match=r"nvfp4: x has K = 24, expected a multiple of .* 16"):
        nvfp4.quantise(torch.zeros(2, 24), "modelopt")
