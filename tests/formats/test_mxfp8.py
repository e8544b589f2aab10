"""MXFP8: e4m3 under E8M0, for weights and for activations."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mono.formats import Mxfp8, check_finite, e4m3, mxfp8

ALL_CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


@st.composite
def blocks(draw: st.DrawFn) -> Tensor:
    """Scale blocks of magnitudes from the bottom to the top of bf16, some zeros of either sign."""
    rows, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    low, high = draw(st.sampled_from([(-140, -110), (-20, 20), (100, 120)]))
    size = torch.exp2(torch.randint(low, high, (rows, groups, 1), generator=rng).double())
    x = torch.randn(rows, groups, 32, generator=rng).double() * size
    x[torch.rand(x.shape, generator=rng) < 0.1] = draw(st.sampled_from([0.0, -0.0]))
    return x.flatten(1).to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


def of_amax(amax: float) -> Tensor:
    """One block whose largest magnitude is `amax`, in the middle and negative."""
    x = torch.zeros(32)
    x[17] = -amax
    return x


def test_every_code_under_every_scale_byte() -> None:
    """65,536 products against float64, where they are exact; rounded to fp32 only where they overflow it."""
    byte = torch.arange(256, dtype=torch.uint8).unsqueeze(-1).expand(256, 8)
    got = Mxfp8(ALL_CODES.expand(256, 256), byte).dequantise()
    scale = torch.tensor([math.ldexp(1.0, c - 127) for c in range(255)] + [math.nan], dtype=torch.float64)
    want = scale.unsqueeze(-1) * e4m3.decode(ALL_CODES).double()
    ordered = ~want.isnan()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[ordered], want[ordered].float())
    finite = got.isfinite()
    assert torch.equal(got[finite].double(), want[finite])  # no rounding: subnormals are exact
    assert torch.equal(got.signbit()[finite], want.signbit()[finite])


def test_each_byte_scales_its_own_32() -> None:
    values = torch.full((2, 64), 1.0).to(torch.float8_e4m3fn)
    got = Mxfp8(values, torch.tensor([[127, 128], [126, 129]], dtype=torch.uint8)).dequantise()
    assert got.tolist() == [[1.0] * 32 + [2.0] * 32, [0.5] * 32 + [4.0] * 32]


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (448.0, 127),
        (449.0, 128),
        (1.0, 119),
        (0.0, 1),
        (224.0, 126),
        (224.0001, 127),
        (1.75, 119),
        (1.76, 120),
    ],
)
def test_scale_of_typed_maxima(amax: float, byte: int) -> None:
    assert mxfp8.quantise(of_amax(amax)).scale.tolist() == [byte]


def test_scale_at_every_boundary() -> None:
    """448 * 2^n does not round up and the next fp32 value does, over the whole range of exponents."""
    for n in range(-126, 120):
        boundary = torch.tensor(math.ldexp(448.0, n))
        past = torch.nextafter(boundary, torch.tensor(math.inf))
        got = [mxfp8.quantise(of_amax(amax.item())).scale.item() for amax in (boundary, past)]
        assert got == [max(n + 127, 1), max(n + 128, 1)], n


def test_quantise_against_typed_literals() -> None:
    x = torch.zeros(32)
    x[:6] = torch.tensor([449.0, -34.0, 1.0, 2.0**-8, 2.0**-9, -0.0])
    matrix = mxfp8.quantise(x)  # scale 2: 224.5, -17, 0.5, 2^-9, 2^-10 (a tie, to zero), -0
    assert matrix.scale.tolist() == [128]
    assert matrix.values[:7].view(torch.uint8).tolist() == [0x76, 0xD8, 0x30, 0x01, 0x00, 0x80, 0x00]
    assert matrix.dequantise()[:6].tolist() == [448.0, -32.0, 1.0, 2.0**-8, 0.0, -0.0]


def test_zero_blocks() -> None:
    matrix = mxfp8.quantise(torch.zeros(2, 64, dtype=torch.bfloat16))
    assert matrix.scale.tolist() == [[1, 1], [1, 1]]
    assert (matrix.dequantise() == 0).all()


@given(blocks())
def test_nothing_saturates_and_the_error_is_that_of_e4m3(x: Tensor) -> None:
    """Half a step of e4m3: 2^-4 of a normal value, 2^-10 scales of a subnormal one; all else is exact."""
    matrix = mxfp8.quantise(x)
    got, want = matrix.dequantise().double(), x.double()
    scale = torch.exp2(matrix.scale.double() - 127).repeat_interleave(32, dim=-1)
    assert (want.abs() <= 448 * scale).all()
    assert ((got - want).abs() <= torch.maximum(want.abs() * 2.0**-4, scale * 2.0**-10)).all()


@given(blocks())
def test_the_scale_is_the_smallest_that_does_not_saturate(x: Tensor) -> None:
    scale = mxfp8.quantise(x).scale.int()
    amax = x.double().unflatten(-1, (-1, 32)).abs().amax(-1)
    assert (amax <= 448 * torch.exp2(scale.double() - 127)).all()
    assert ((amax > 448 * torch.exp2(scale.double() - 128)) | (scale == 1)).all()


@given(blocks())
def test_quantising_again_keeps_every_value(x: Tensor) -> None:
    """Values stay, codes need not: 225 rounds to 224 under 2^0, and 224 is stored as 448 under 2^-1."""
    once = mxfp8.quantise(x).dequantise()
    twice = mxfp8.quantise(once).dequantise()
    assert torch.equal(twice.view(torch.int32), once.view(torch.int32))


def test_quantising_again_may_change_codes() -> None:
    once = mxfp8.quantise(of_amax(225.0))
    twice = mxfp8.quantise(once.dequantise())
    assert (once.scale.item(), twice.scale.item()) == (127, 126)
    assert torch.equal(once.dequantise(), twice.dequantise())


def test_blocks_do_not_depend_on_their_neighbours() -> None:
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    whole, part = mxfp8.quantise(x), mxfp8.quantise(x[1:, 32:64])
    assert torch.equal(whole.scale[1:, 1:2], part.scale)
    assert torch.equal(whole.values[1:, 32:64].view(torch.uint8), part.values.view(torch.uint8))


def test_nan_stays_in_its_place_and_other_blocks_stay_whole() -> None:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    clean = mxfp8.quantise(x)
    x[1, 40] = math.nan
    matrix = mxfp8.quantise(x)
    assert matrix.scale[1, 1] == 254
    assert matrix.dequantise().isnan().nonzero().tolist() == [[1, 40]]
    assert torch.equal(matrix.scale[0], clean.scale[0])
    assert matrix.scale[1, 0] == clean.scale[1, 0]
    kept = torch.ones(2, 64, dtype=torch.bool)
    kept[1, 32:] = False
    assert torch.equal(matrix.dequantise()[kept], clean.dequantise()[kept])


def test_infinity_stays_infinite() -> None:
    x = of_amax(math.inf)
    assert mxfp8.quantise(x).scale.tolist() == [254]
    assert mxfp8.quantise(x).dequantise()[17] == -math.inf


def test_check_finite_counts() -> None:
    x = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    with pytest.raises(ValueError, match=r"w2 holds 3 non-finite values of 4, expected none"):
        check_finite("w2", x)
    check_finite("w2", x[:1])


def test_constructor_and_quantiser_name_the_field() -> None:
    values, scale = ALL_CODES.reshape(4, 64), torch.zeros(4, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"mxfp8: values has dtype torch.uint8"):
        Mxfp8(values.view(torch.uint8), scale)
    with pytest.raises(ValueError, match=r"mxfp8: scale has dtype torch.float32, expected torch.uint8"):
        Mxfp8(values, scale.float())
    with pytest.raises(ValueError, match=r"mxfp8: scale has shape \[4, 1\], expected \[4, 2\]: one byte"):
        Mxfp8(values, scale[:, :1])
    with pytest.raises(ValueError, match=r"mxfp8: values has K = 63, expected a multiple of .* 32"):
        Mxfp8(values[:, :63], scale[:, :1])
    with pytest.raises(ValueError, match=r"mxfp8: x has K = 40, expected a multiple of .* 32"):
        mxfp8.quantise(torch.zeros(2, 40))
