"""Linear layers and their row quantiser: reference against float64, fast arm against reference."""

import numpy as np
import pytest
import torch
from compiled_launches import compiled_launches, meta
from hypothesis import given
from hypothesis import strategies as st
from strict import ORDERS, on_devices, strict
from torch import Tensor

from mono.fast.ops import linear as fast
from mono.formats import Bf16, Matrix, PtpcFp8, mxfp4, mxfp8, nvfp4, ptpc_fp8
from mono.reference.ops.linear import linear

E4M3 = torch.float8_e4m3fn


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """T, N, K off every power of two as well as on some."""
    T = draw(st.sampled_from([1, 2, 8, 15, 16, 17, 32]))
    return T, draw(st.integers(1, 140)), draw(st.integers(1, 300))


def bits(x: Tensor) -> Tensor:
    return x.cpu().contiguous().view(torch.uint8)


def close_sums(got: Tensor, want: np.ndarray, magnitude: np.ndarray, K: int) -> None:
    """Within the worst that the order of a K-term fp32 sum can do, and half an ulp of bf16."""
    allowed = 2.0**-8 * np.abs(want) + K * 2.0**-24 * magnitude
    assert (np.abs(got.cpu().double().numpy() - want) <= allowed).all()


MATRICES = {
    "bf16": lambda w: Bf16(w.bfloat16()),
    "ptpc_fp8": ptpc_fp8.quantise_weight,
    "mxfp8": mxfp8.quantise,
    "mxfp4": mxfp4.quantise,
    "nvfp4": lambda w: nvfp4.quantise(w, "modelopt"),
}


@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", MATRICES)
def test_reference_is_the_product_of_the_decoded_values(name: str, activations: str) -> None:
    x = torch.randn(5, 96)
    matrix: Matrix = MATRICES[name](torch.randn(7, 96))
    got = linear(x, matrix, activations=activations)
    if name == "ptpc_fp8":
        scale = x.abs().amax(1, keepdim=True) / 448
        rows = (x / scale).to(E4M3).double() * scale.double()  # |x| / scale is at most 448
    elif activations == "mxfp8" and name != "bf16":
        blocks = x.bfloat16().double().reshape(5, 3, 32)
        unit = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(2, keepdim=True) / 448)))
        rows = ((blocks / unit).to(E4M3).double() * unit).reshape(5, 96)
    else:
        rows = x.bfloat16().double()
    want = rows @ matrix.dequantise().double().T
    # 96 fp32 additions, and at most two products with a scale
    assert torch.allclose(got.double(), want, rtol=0, atol=98 * 2.0**-24 * 96 * 8)
    assert not torch.allclose(got.double(), want * (1 + 2.0**-8), rtol=0, atol=98 * 2.0**-24 * 96 * 8)


@on_devices
@given(shapes(), st.integers(-30, 30), st.integers(0, 2**32 - 1))
def test_rows_quantise_exactly(device: str, shape: tuple[int, int, int], power: int, seed: int) -> None:
    T, _, K = shape
    rng = torch.Generator().manual_seed(seed)
    wide = (torch.randn(T, K + 5, generator=rng) * 2.0**power).bfloat16()
    wide[0] = 0.0
    x = wide.to(device)[:, :K]
    with strict(device):
        codes, scale = fast.quantise_rows(x)
    want_codes, want_scale = ptpc_fp8.quantise_rows(x.cpu())
    assert torch.equal(bits(codes), bits(want_codes))
    assert torch.equal(scale.cpu(), want_scale)


@on_devices
def test_special_rows_quantise_as_the_format_says(device: str) -> None:
    x = torch.randn(6, 40).bfloat16()
    x[0, 3], x[1, 5], x[2] = torch.nan, torch.inf, 2.0**-133
    x[3], x[4, 7] = -0.0, 3.0e38
    with strict(device):
        codes, scale = fast.quantise_rows(x.to(device))
    want_codes, want_scale = ptpc_fp8.quantise_rows(x)
    torch.testing.assert_close(codes.cpu().float(), want_codes.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scale.cpu(), want_scale, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(codes.cpu().float().signbit()[3], torch.ones(40, dtype=torch.bool))


@on_devices
@given(shapes(), st.integers(0, 2**32 - 1))
def test_ptpc_product_is_the_reference(device: str, shape: tuple[int, int, int], seed: int) -> None:
    T, N, K = shape
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=rng).bfloat16()
    whole = ptpc_fp8.quantise_weight(torch.randn(N, K + 3, generator=rng) * 2.0**-4)
    matrix = PtpcFp8(whole.values[:, :K], whole.scale)  # rows K + 3 apart
    codes, scale = ptpc_fp8.quantise_rows(x)
    with strict(device):
        got = fast.ptpc_linear(codes.to(device), scale.to(device), matrix.to(device))
    rows = codes.double().numpy() * scale.double().numpy()[:, None]
    weight = matrix.values.double().numpy() * matrix.scale.double().numpy()[:, None]
    close_sums(got, rows @ weight.T, np.abs(rows) @ np.abs(weight).T, K + 2)
    close_sums(got, linear(x, matrix).double().numpy(), np.abs(rows) @ np.abs(weight).T, 2 * K)


@on_devices
@given(shapes(), st.integers(0, 2**32 - 1))
def test_bf16_product_is_the_reference(device: str, shape: tuple[int, int, int], seed: int) -> None:
    T, N, K = shape
    rng = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(n, K, generator=rng).bfloat16() for n in (T, N))
    with strict(device):
        got = fast.bf16_linear(x.to(device), Bf16(w.to(device))).cpu()
    want, magnitude = x.double() @ w.double().T, x.abs().double() @ w.abs().double().T
    assert got.dtype == torch.float32
    assert ((got.double() - want).abs() <= K * 2.0**-24 * magnitude).all()


@on_devices
@pytest.mark.parametrize("K", [100, 128, 256, 384, 512, 640, 768, 1000, 1100])
def test_no_width_loses_its_tail(device: str, K: int) -> None:
    """Each step of the product weighs in: weights grow along K, so that a lost or doubled tail shows."""
    n, k, m = torch.arange(64)[:, None], torch.arange(K)[None, :], torch.arange(4)[:, None]
    x = (((3 * m + k + k // 7) % 17 - 8) / 8).bfloat16()
    w = ((7 * n + 5 * k + k // 16) % 16 - 8.0) * (1 + 3 * (k > K - 40))
    matrix = ptpc_fp8.quantise_weight(w)
    with strict(device):
        got = fast.ptpc_linear(*fast.quantise_rows(x.to(device)), matrix.to(device))
    want = linear(x, matrix)
    error = ((got.cpu().float() - want).norm(dim=1) / want.norm(dim=1)).max()
    assert error < 2.0**-8  # half an ulp of bf16 in every element
    cut = linear(x[:, : K - 32], PtpcFp8(matrix.values[:, : K - 32], matrix.scale))
    assert ((cut - want).norm(dim=1) / want.norm(dim=1)).max() > 0.1


@on_devices
@pytest.mark.parametrize("gpu_tiles", [False, True])
def test_many_tiles_are_one_product(device: str, gpu_tiles: bool) -> None:
    """Several tiles of tokens, outputs and K, the last of each cut off, with either device's tiles."""
    T, N, K = 17, 600, 1100
    x, w = torch.randn(T, K).bfloat16(), torch.randn(N, K)
    plain, matrix = Bf16(w.bfloat16()), ptpc_fp8.quantise_weight(w)
    with strict(device, gpu_tiles=gpu_tiles):
        logits = fast.bf16_linear(x.to(device), plain.to(device)).cpu()
        y = fast.ptpc_linear(*fast.quantise_rows(x.to(device)), matrix.to(device)).cpu()
    magnitude = x.abs().double() @ w.bfloat16().abs().double().T
    want = x.double() @ w.bfloat16().double().T
    assert ((logits.double() - want).abs() <= K * 2.0**-24 * magnitude).all()
    close_sums(y, linear(x, matrix).double().numpy(), 1.1 * magnitude.numpy(), 2 * K)


@on_devices
def test_a_nan_row_or_channel_spoils_no_other(device: str) -> None:
    x = torch.randn(5, 64).bfloat16()
    matrix = ptpc_fp8.quantise_weight(torch.randn(20, 64))
    x[3, 9] = torch.nan
    matrix.scale[11] = torch.nan
    with strict(device):
        got = fast.ptpc_linear(*fast.quantise_rows(x.to(device)), matrix.to(device)).cpu()
    want = torch.zeros(5, 20, dtype=torch.bool)
    want[3], want[:, 11] = True, True
    assert torch.equal(got.isnan(), want)


@given(shapes(), st.data())
def test_a_row_does_not_depend_on_its_neighbours_or_the_order(
    shape: tuple[int, int, int], data: st.DataObject
) -> None:
    T, N, K = shape
    x, matrix = torch.randn(T, K).bfloat16(), ptpc_fp8.quantise_weight(torch.randn(N, K))
    i = data.draw(st.integers(0, T - 1))
    other = torch.full_like(x, 2.0)
    other[i] = x[i]
    with strict(order=data.draw(st.sampled_from(ORDERS))):
        got = fast.ptpc_linear(*fast.quantise_rows(x), matrix)
        alone = fast.ptpc_linear(*fast.quantise_rows(other), matrix)
    assert torch.equal(got[i], alone[i])


def test_rows_beyond_two_gigabytes_are_addressed() -> None:
    """Rows 2^24 bytes apart: the last of 160 begins beyond 2^31, where a 32-bit product has wrapped."""
    from mono.fast.interpreter import interpret

    N, K, apart = 160, 32, 2**24
    # memory that is never touched is never there
    pool = torch.empty(N * apart, dtype=torch.uint8)
    values = pool.as_strided((N, K), (apart, 1))
    values.copy_(torch.randint(0, 0x70, (N, K), dtype=torch.uint8))
    matrix = PtpcFp8(values.view(E4M3), torch.ones(N))
    codes, scale = ptpc_fp8.quantise_rows(torch.randn(2, K))
    with interpret():
        got = fast.ptpc_linear(codes, scale, matrix)
    near = PtpcFp8(values.contiguous().view(E4M3), torch.ones(N))
    with interpret():
        assert torch.equal(got, fast.ptpc_linear(codes, scale, near))


def test_errors_name_the_argument() -> None:
    matrix = ptpc_fp8.quantise_weight(torch.randn(4, 32))
    x8, scale = ptpc_fp8.quantise_rows(torch.randn(2, 32))
    with pytest.raises(ValueError, match=r"x8 is torch.bfloat16 \[2, 32\], expected float8_e4m3fn \[T, 32\]"):
        fast.ptpc_linear(x8.bfloat16(), scale, matrix)
    with pytest.raises(ValueError, match=r"scale is torch.float32 \[3\], expected contiguous fp32 \[2\]"):
        fast.ptpc_linear(x8, torch.ones(3), matrix)
    with pytest.raises(ValueError, match="x has stride 2 along K"):
        fast.quantise_rows(torch.zeros(2, 64).bfloat16()[:, ::2])
    with pytest.raises(ValueError, match=r"x is torch.float32 \[2, 32\], expected bf16 \[T, 32\]"):
        fast.bf16_linear(torch.zeros(2, 32), Bf16(torch.zeros(4, 32).bfloat16()))


# N x K of one rank of four: qkv with its index columns, o, gate and up, down
@pytest.mark.parametrize(("N", "K"), [(2560, 6144), (6144, 2048), (6144, 6144), (6144, 3072)])
def test_ptpc_product_compiles_to_matrix_instructions(compile_target, N: int, K: int) -> None:
    x8, scale = meta(16, K, dtype=E4M3), meta(16, dtype=torch.float32)
    matrix = PtpcFp8(meta(N, K, dtype=E4M3), meta(N, dtype=torch.float32))
    made = compiled_launches(compile_target, lambda: fast.ptpc_linear(x8, scale, matrix))
    made |= compiled_launches(compile_target, lambda: fast.quantise_rows(meta(16, K)))
    assert {name: c.spills for name, c in made.items()} == {
        "_ptpc_linear_kernel": 0,
        "_quantise_rows_kernel": 0,
    }
    # fp16 operands: the FP8 units keep fewer bits of a sum
    assert made["_ptpc_linear_kernel"].matches(r"mma\S*\.f16|v_mfma_f32\S*_f16|tcgen05\.mma\S*kind::f16")
    assert not made["_ptpc_linear_kernel"].matches(r"mma\S*e4m3|v_mfma\S*(fp8|f8)")


def test_logits_compile_to_matrix_instructions(compile_target) -> None:
    x, head = meta(16, 6144), Bf16(meta(200064, 6144))
    made = compiled_launches(compile_target, lambda: fast.bf16_linear(x, head))["_bf16_linear_kernel"]
    assert made.spills == 0
    assert made.matches(r"wgmma\S*bf16|v_mfma_f32\S*_bf16|tcgen05\.mma\S*kind::f16")
