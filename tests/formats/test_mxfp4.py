"""MXFP4: packing, every code under every scale byte, and the "even" rule."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mono.formats import Mxfp4, e2m1, mxfp4

# typed from OCP MX 1.0, section 5.3.3
TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@st.composite
def blocks(draw: st.DrawFn) -> Tensor:
    """Scale blocks of magnitudes from the bottom to near the top of bf16, some zeros of either sign."""
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
    codes = (torch.arange(32, dtype=torch.uint8) % 16).expand(256, 32)
    got = Mxfp4(e2m1.pack(codes), torch.arange(256, dtype=torch.uint8).unsqueeze(-1)).dequantise()
    assert got.dtype == torch.float32
    for byte, row in enumerate(got.tolist()):
        if byte == 255:
            assert all(math.isnan(value) for value in row)
            continue
        exact = [math.ldexp(value, byte - 127) for value in TABLE] * 2
        # 4 and 6 under the two largest scales exceed fp32
        want = [value if abs(value) < 2.0**128 else math.copysign(math.inf, value) for value in exact]
        assert [value.hex() for value in row] == [value.hex() for value in want], byte


def test_low_nibble_is_the_even_k() -> None:
    packed = torch.full((1, 16), 0x21, dtype=torch.uint8)
    got = Mxfp4(packed, torch.tensor([[128]], dtype=torch.uint8)).dequantise()
    assert got.tolist() == [[1.0, 2.0] * 16]  # codes 1 and 2 are 0.5 and 1, times two


def test_each_byte_scales_its_own_32() -> None:
    packed = torch.full((2, 32), 0x22, dtype=torch.uint8)
    got = Mxfp4(packed, torch.tensor([[127, 128], [126, 129]], dtype=torch.uint8)).dequantise()
    assert got.tolist() == [[1.0] * 32 + [2.0] * 32, [0.5] * 32 + [4.0] * 32]


def test_smallest_and_largest_scales_take_part_in_products() -> None:
    """32 ones under byte 0 times 2^120 is 0.25, and under byte 254 times 2^-125 is 128."""
    ones = torch.full((2, 16), 0x22, dtype=torch.uint8)
    matrix = Mxfp4(ones, torch.tensor([[0], [254]], dtype=torch.uint8)).dequantise()
    assert (matrix[0] @ torch.full((32,), 2.0**120)).item() == 0.25
    assert (matrix[1] @ torch.full((32,), 2.0**-125)).item() == 128.0


def test_byte_255_makes_its_own_row_nan_and_no_other() -> None:
    scale = torch.full((3, 2), 127, dtype=torch.uint8)
    scale[1, 0] = 255
    matrix = Mxfp4(torch.full((3, 32), 0x22, dtype=torch.uint8), scale)
    y = matrix.dequantise() @ torch.ones(64)
    assert y.isnan().tolist() == [False, True, False]
    assert y[0::2].tolist() == [64.0, 64.0]


@pytest.mark.parametrize("k", [32, 96, 128, 256, 384, 512, 640, 768])
def test_values_and_products_at_every_width(k: int) -> None:
    """Scales and codes that differ along n and k, against integers: every product is exact.

    A scale row stride padded to a multiple of 8 and a dropped tail are seen at every width that is no
    multiple of 256, which shows that the inputs can tell; at multiples of 256 both faults are invisible.
    """
    n, m, groups = 64, 4, k // 32
    rows, columns = torch.arange(n).unsqueeze(-1), torch.arange(k)
    codes = (7 * rows + 5 * columns + columns // 16) % 16
    scale = 127 + (7 * rows + 3 * torch.arange(groups)) % 9 - 4
    matrix = Mxfp4(e2m1.pack(codes.to(torch.uint8)), scale.to(torch.uint8))

    halves = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])[codes]
    exact = halves * 2 ** (scale - 123).repeat_interleave(32, dim=-1)  # in units of 2^-5
    assert torch.equal(matrix.dequantise().double() * 32, exact.double())

    x = (3 * torch.arange(m).unsqueeze(-1) + columns + columns // 7) % 17 - 8  # in units of 2^-3
    want = (x @ exact.T).double() / 256
    got = (x.double() / 8) @ matrix.dequantise().double().T
    assert torch.equal(got, want)

    def worst_row(wrong: Tensor) -> float:
        off = (wrong - want).norm(dim=-1) / want.norm(dim=-1)
        return off.max().item()

    padded = torch.nn.functional.pad(scale.flatten(), (0, n * 8))
    stride = -(-groups // 8) * 8
    misread = padded[torch.arange(n).unsqueeze(-1) * stride % (n * groups) + torch.arange(groups)]
    shifted = halves.double() * 2.0 ** (misread - 123).repeat_interleave(32, dim=-1)
    whole = k // 256 * 256
    faults = (x.double() @ shifted.T / 256, x[:, :whole].double() @ exact[:, :whole].double().T / 256)
    for fault in faults:
        assert worst_row(fault) == 0 if k % 256 == 0 else worst_row(fault) > 0.5


@pytest.mark.parametrize(
    ("amax", "byte"), [(6.0, 127), (6.99, 127), (7.0, 128), (1.75, 126), (1.74, 125), (4.0, 127), (3.99, 127)]
)
def test_scale_of_typed_maxima(amax: float, byte: int) -> None:
    assert mxfp4.quantise(of_amax(amax)).scale.tolist() == [byte]


def test_quantise_against_typed_literals() -> None:
    x = torch.zeros(32)
    x[:10] = torch.tensor([6.9, -6.5, 5.0, 3.5, 2.5, 1.25, 0.25, -0.25, -0.0, 0.75])
    matrix = mxfp4.quantise(x)  # scale 1; codes 7 15 6 6 4 2 0 8 8 2, then zeros
    assert matrix.scale.tolist() == [127]
    assert matrix.packed.tolist() == [0xF7, 0x66, 0x24, 0x80, 0x28] + [0] * 11


def test_zero_blocks() -> None:
    matrix = mxfp4.quantise(torch.zeros(2, 64, dtype=torch.bfloat16))
    assert matrix.scale.tolist() == [[0, 0], [0, 0]]
    assert (matrix.dequantise() == 0).all()


@given(blocks())
def test_the_largest_of_a_block_lands_in_the_top_of_the_range(x: Tensor) -> None:
    scale = mxfp4.quantise(x).scale
    scaled = x.double().unflatten(-1, (-1, 32)).abs().amax(-1) / torch.exp2(scale.double() - 127)
    assert (scaled < 7).all()
    assert ((scaled >= 3.5) | (scale == 0)).all()


@given(blocks())
def test_error_is_that_of_e2m1(x: Tensor) -> None:
    """Half a step: 1/4 of the scale below 2, 1/2 below 4, and 1 above, where [6, 7) saturates."""
    matrix = mxfp4.quantise(x)
    scale = torch.exp2(matrix.scale.double() - 127).repeat_interleave(32, dim=-1)
    scaled = x.double().abs() / scale
    bound = torch.where(scaled < 2, 0.25, torch.where(scaled < 4, 0.5, 1.0)) * scale
    assert ((matrix.dequantise().double() - x.double()).abs() <= bound).all()


@given(blocks())
def test_quantising_again_changes_no_byte(x: Tensor) -> None:
    once = mxfp4.quantise(x)
    twice = mxfp4.quantise(once.dequantise())
    assert torch.equal(twice.packed, once.packed)
    # a block of zeros may have come from values too small for any code
    alive = (once.dequantise() != 0).unflatten(-1, (-1, 32)).any(-1)
    assert torch.equal(twice.scale[alive], once.scale[alive])


def test_shards_aligned_to_32_are_cuts_of_the_whole() -> None:
    x = torch.randn(4, 192, generator=torch.Generator().manual_seed(3))
    whole, shard = mxfp4.quantise(x), mxfp4.quantise(x[:, 96:])
    assert torch.equal(shard.packed, whole.packed[:, 48:])
    assert torch.equal(shard.scale, whole.scale[:, 3:])


def test_refuses_what_is_not_finite_with_its_count() -> None:
    x = torch.ones(2, 32)
    x[0, 3], x[1, 5], x[1, 6] = math.nan, math.inf, -math.inf
    with pytest.raises(ValueError, match=r"mxfp4: x holds 3 non-finite values of 64, expected none"):
        mxfp4.quantise(x)


def test_constructor_and_quantiser_name_the_field() -> None:
    packed, scale = torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"mxfp4: packed has dtype torch.int8, expected torch.uint8"):
        Mxfp4(packed.view(torch.int8), scale)
    with pytest.raises(ValueError, match=r"mxfp4: scale has dtype torch.float32, expected torch.uint8"):
        Mxfp4(packed, scale.float())
    with pytest.raises(ValueError, match=r"mxfp4: scale has shape \[4, 4\], expected \[4, 2\]: one byte"):
        Mxfp4(packed, torch.zeros(4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"mxfp4: packed has K = 40, expected a multiple of .* 32"):
        Mxfp4(packed[:, :20], scale[:, :1])
    with pytest.raises(ValueError, match=r"mxfp4: x has K = 48, expected a multiple of .* 32"):
        mxfp4.quantise(torch.zeros(2, 48))
