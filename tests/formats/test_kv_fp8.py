"""The FP8 KV cache: one scale per token and head, unit scale for index keys."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mono.formats import e4m3, kv_fp8


@st.composite
def heads(draw: st.DrawFn) -> Tensor:
    """[T, G, D] vectors of very different magnitude."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 40)))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    size = torch.exp2(torch.randint(-30, 30, (*shape[:2], 1), generator=rng).float())
    return (torch.randn(shape, generator=rng) * size).to(
        draw(st.sampled_from([torch.float32, torch.bfloat16]))
    )


def test_heads_against_typed_literals() -> None:
    # scales 2, 3, 1 and 1/448: one for each token and head, true division, 1.0 for zeros
    x = torch.tensor([[[896.0, 34.0], [1344.0, 57.0]], [[0.0, -0.0], [1.0, -0.25]]])
    values, scale = kv_fp8.quantise_heads(x)
    assert scale.tolist() == [[2.0, 3.0], [1.0, torch.tensor(1 / 448).item()]]
    assert e4m3.decode(values).tolist() == [[[448.0, 16.0], [448.0, 20.0]], [[0.0, -0.0], [448.0, -112.0]]]
    got = kv_fp8.dequantise(values, scale)
    assert got.dtype == torch.float32
    assert got[0].tolist() == [[896.0, 32.0], [1344.0, 60.0]]


@given(heads())
def test_error_is_that_of_e4m3(x: Tensor) -> None:
    """Half a step: 2^-4 of a normal value, 2^-10 scales of a subnormal one; 2^-20 for the fp32 roundings."""
    values, scale = kv_fp8.quantise_heads(x)
    bound = torch.maximum(x.float().abs() * 2.0**-4, scale.unsqueeze(-1) * 2.0**-10) * (1 + 2.0**-20)
    assert ((kv_fp8.dequantise(values, scale) - x.float()).abs() <= bound).all()


@given(heads())
def test_the_largest_of_each_vector_is_stored_as_448(x: Tensor) -> None:
    values, _ = kv_fp8.quantise_heads(x)
    largest = e4m3.decode(values).abs().amax(-1)
    assert torch.equal(largest, torch.where((x == 0).all(-1), 0.0, 448.0))


def test_a_nan_stays_in_its_own_head() -> None:
    x = torch.arange(1.0, 25.0).reshape(3, 2, 4)
    clean = kv_fp8.dequantise(*kv_fp8.quantise_heads(x))
    x[1, 0, 2] = math.nan
    got = kv_fp8.dequantise(*kv_fp8.quantise_heads(x))
    assert got.isnan().all(-1).nonzero().tolist() == [[1, 0]]
    kept = torch.ones(3, 2, dtype=torch.bool)
    kept[1, 0] = False
    assert torch.equal(got[kept], clean[kept])


def test_index_keys_have_unit_scale() -> None:
    x = torch.tensor([[1.0, -17.0, 449.0, 1e30, -math.inf, 2.0**-10, math.nan]])
    got = e4m3.decode(kv_fp8.encode_index_key(x))
    assert got[0, :6].tolist() == [1.0, -16.0, 448.0, 448.0, -448.0, 0.0]
    assert got[0, 6].isnan()


def test_dequantise_names_the_field() -> None:
    values = torch.zeros(2, 3, 4).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"kv_fp8: scale has shape \[2, 3, 1\], expected \[2, 3\]"):
        kv_fp8.dequantise(values, torch.ones(2, 3, 1))
    with pytest.raises(ValueError, match=r"kv_fp8: scale has dtype torch.bfloat16, expected torch.float32"):
        kv_fp8.dequantise(values, torch.ones(2, 3).bfloat16())
    with pytest.raises(ValueError, match=r"e4m3: codes has dtype torch.uint8"):
        kv_fp8.dequantise(values.view(torch.uint8), torch.ones(2, 3))
