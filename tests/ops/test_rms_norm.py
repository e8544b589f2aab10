"""Residual sum and Gemma RMSNorm: reference against float64, fast arm against reference."""

import numpy as np
import pytest
import torch
from compiled_launches import compiled_launches, meta
from hypothesis import given
from hypothesis import strategies as st
from strict import ORDERS, on_devices, strict, ulps
from torch import Tensor

from mono.fast.ops import rms_norm as fast
from mono.formats import mxfp8, ptpc_fp8
from mono.interface import Carry
from mono.parallel import SOLO
from mono.reference.ops import rms_norm as reference

EPS = 1e-6
# a sum of at most 6144 squares in pairwise order, one rsqrt of 2 ulp and three products
FEW_ULPS_OF_FP32 = 8 * 2.0**-23


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rows of any width, magnitude and stride, with or without a partial, and a zero-centred weight."""
    rows, width = draw(st.sampled_from([1, 3, 8, 16, 17, 32])), draw(st.integers(1, 300))
    size = 2.0 ** draw(st.integers(-12, 12))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    residual = (randn(rows, width + draw(st.integers(0, 9))) * size).bfloat16()[:, :width]
    partial = (randn(rows, width) * size).bfloat16() if draw(st.booleans()) else None
    return residual, partial, (randn(width) * 0.1).bfloat16()


def exact_norm(total: Tensor, weight: Tensor) -> np.ndarray:
    """Zhang and Sennrich's formula in float64."""
    x, w = total.double().numpy(), weight.double().numpy()
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * (1.0 + w)


def on(device: str, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.to(device) for x in tensors]


@given(cases())
def test_reference_is_the_formula(case: tuple[Tensor, Tensor | None, Tensor]) -> None:
    residual, partial, weight = case
    total = reference.absorb(Carry(residual, partial), SOLO)
    assert torch.equal(total, residual.float() + (0 if partial is None else partial.float()))
    got = reference.gemma_rms_norm(total, weight, EPS)
    np.testing.assert_allclose(got.numpy(), exact_norm(total, weight), rtol=FEW_ULPS_OF_FP32)


@on_devices
@given(cases())
def test_bf16_norm_is_within_one_ulp(device: str, case: tuple[Tensor, Tensor | None, Tensor]) -> None:
    residual, partial, weight = case
    total = reference.absorb(Carry(residual, partial), SOLO)
    with strict(device):
        got_residual, got = fast.absorb_norm_bf16(*on(device, residual, partial, weight), EPS)
    assert torch.equal(got_residual.cpu(), total.bfloat16())
    # the order of one fp32 sum may move a value over a rounding boundary of bf16
    assert ulps(got, reference.gemma_rms_norm(total, weight, EPS).bfloat16()).max() <= 1


@on_devices
@given(cases())
def test_ptpc_codes_are_the_nearest_to_the_unrounded_norm(
    device: str, case: tuple[Tensor, Tensor | None, Tensor]
) -> None:
    residual, partial, weight = case
    total = reference.absorb(Carry(residual, partial), SOLO)
    with strict(device):
        got_residual, codes, scale = fast.absorb_norm_ptpc(*on(device, residual, partial, weight), EPS)
    assert torch.equal(got_residual.cpu(), total.bfloat16())
    exact = exact_norm(total, weight)
    want_scale = np.abs(exact).max(-1) / 448
    want_scale[want_scale == 0] = 1.0
    np.testing.assert_allclose(scale.cpu().numpy(), want_scale, rtol=FEW_ULPS_OF_FP32)
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    grid = grid[~np.isnan(grid)]
    scaled = exact / scale.cpu().double().numpy()[:, None]
    least = np.abs(scaled[..., None] - grid).min(-1)
    off = np.abs(scaled - codes.cpu().double().numpy())
    assert (off <= least + FEW_ULPS_OF_FP32 * np.abs(scaled)).all()


@on_devices
@pytest.mark.parametrize("width", [32, 96, 256])
def test_mxfp8_norm_is_the_quantised_bf16_norm(device: str, width: int) -> None:
    residual, partial = (torch.randn(8, width).mul(2.0**5).bfloat16() for _ in range(2))
    residual[2], partial[2] = 0.0, 0.0
    residual[3, width // 2] = torch.inf
    weight = (torch.randn(width) * 0.1).bfloat16()
    with strict(device):
        _, plain = fast.absorb_norm_bf16(*on(device, residual, partial, weight), EPS)
        _, x, rounded = fast.absorb_norm_mxfp8(*on(device, residual, partial, weight), EPS)
    assert torch.equal(ulps(x, plain), torch.zeros(8, width))
    want = mxfp8.quantise(x.cpu()).dequantise().bfloat16()
    assert torch.equal(ulps(rounded, want), torch.zeros(8, width))


@on_devices
def test_a_zero_row_has_scale_one_and_codes_zero(device: str) -> None:
    residual = torch.zeros(3, 100).bfloat16()
    residual[1] = 2.0
    with strict(device):
        _, codes, scale = fast.absorb_norm_ptpc(
            *on(device, residual, -residual, torch.zeros(100).bfloat16()), EPS
        )
    assert not codes.cpu().float().any()
    assert torch.equal(scale.cpu(), torch.ones(3))


@on_devices
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_no_other(device: str, bad: float) -> None:
    residual, weight = torch.randn(5, 70).bfloat16(), torch.zeros(70).bfloat16()
    spoilt = residual.clone()
    spoilt[2, 33] = bad
    with strict(device):
        _, want_codes, want_scale = fast.absorb_norm_ptpc(*on(device, residual, None, weight), EPS)
        _, codes, scale = fast.absorb_norm_ptpc(*on(device, spoilt, None, weight), EPS)
    codes, want_codes = codes.cpu().float(), want_codes.cpu().float()
    others = [0, 1, 3, 4]
    assert torch.equal(codes[others], want_codes[others])
    assert torch.equal(scale.cpu()[others], want_scale.cpu()[others])
    want = ptpc_fp8.quantise_rows(reference.gemma_rms_norm(spoilt.float(), weight, EPS))
    assert torch.equal(codes[2].isnan(), want[0][2].float().isnan())
    assert codes[2].isnan().any()


@given(cases(), st.data())
def test_a_row_does_not_depend_on_its_neighbours_or_the_order(
    case: tuple[Tensor, Tensor | None, Tensor], data: st.DataObject
) -> None:
    residual, partial, weight = case
    i = data.draw(st.integers(0, len(residual) - 1))
    with strict(order=data.draw(st.sampled_from(ORDERS))):
        _, x = fast.absorb_norm_bf16(residual, partial, weight, EPS)
        other = torch.full_like(residual, 3.0)
        other[i] = residual[i]
        _, y = fast.absorb_norm_bf16(other, partial, weight, EPS)
    assert torch.equal(x[i], y[i])


def test_errors_name_the_argument() -> None:
    x, weight = torch.zeros(4, 64).bfloat16(), torch.zeros(64).bfloat16()
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16 \[64\], expected bf16 \[32\]"):
        fast.absorb_norm_bf16(x[:, :32], None, weight, EPS)
    with pytest.raises(ValueError, match=r"partial is torch\.float32"):
        fast.absorb_norm_bf16(x, x.float(), weight, EPS)
    with pytest.raises(ValueError, match="residual has stride 2 along H"):
        fast.absorb_norm_ptpc(x[:, ::2], None, weight[:32], EPS)
    with pytest.raises(ValueError, match="H is 33, expected a multiple"):
        fast.absorb_norm_mxfp8(x[:, :33], None, weight[:33], EPS)


def test_compiles_at_real_width(compile_target) -> None:
    x, weight = meta(8, 6144), meta(6144)
    for norm in (fast.absorb_norm_ptpc, fast.absorb_norm_bf16, fast.absorb_norm_mxfp8):
        made = compiled_launches(compile_target, lambda norm=norm: norm(x, x, weight, EPS))
        assert {name: c.spills for name, c in made.items()} == {"_absorb_norm_kernel": 0}
