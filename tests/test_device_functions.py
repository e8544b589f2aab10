"""Device helpers over whole code ranges, against arithmetic on Python numbers and float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from compile_harness import compile_kernel
from hypothesis import given
from hypothesis import strategies as st

from mono.fast.interpreter import launch_context
from mono.fast.ops import device as helpers

E4M3 = torch.float8_e4m3fn
FP32_MAX = torch.finfo(torch.float32).max


@triton.jit
def map_kernel(x_ptr, y_ptr, F: tl.constexpr, N: tl.constexpr):
    """y = F(x)."""
    i = tl.arange(0, N)
    tl.store(y_ptr + i, F(tl.load(x_ptr + i)))


@triton.jit
def map2_kernel(a_ptr, b_ptr, y_ptr, F: tl.constexpr, N: tl.constexpr):
    """y = F(a, b)."""
    i = tl.arange(0, N)
    tl.store(y_ptr + i, F(tl.load(a_ptr + i), tl.load(b_ptr + i)))


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, y_ptr, alpha, beta, limit, N: tl.constexpr):
    i = tl.arange(0, N)
    y = helpers.swiglu_oai(tl.load(gate_ptr + i), tl.load(up_ptr + i), alpha, beta, limit)
    tl.store(y_ptr + i, y)


def padded(x: torch.Tensor) -> torch.Tensor:
    """x and ones up to a power of two."""
    fill = torch.ones(triton.next_power_of_2(len(x)) - len(x)).to(x.dtype)
    return torch.cat([x, fill.to(x.device)])


def apply(function: Any, x: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """function(x), by a kernel."""
    wide = padded(x).to(device)
    y = torch.empty(len(wide), dtype=dtype, device=device)
    with launch_context(device):
        map_kernel[(1,)](wide, y, F=function, N=len(wide))
    return y[: len(x)].cpu()


def floats(bits: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(bits, np.uint32).view(np.float32))


def around(values: Any) -> torch.Tensor:
    """Each fp32 value and its two neighbours."""
    x = np.asarray(values, np.float32)
    return torch.from_numpy(
        np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(0))])
    )


def test_to_bf16_rounds_to_nearest_even(device):
    high = torch.arange(0, 0x7F80, 5, dtype=torch.int64)
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high[:, None] * 65536 + low).reshape(-1)
    up = (low > 0x8000) | ((low == 0x8000) & (high[:, None] % 2 == 1))
    want = (high[:, None] + up).reshape(-1).to(torch.int16).view(torch.bfloat16)
    x = floats(bits)
    assert torch.equal(apply(helpers.to_bf16, x, torch.bfloat16, device), want)
    assert torch.equal(apply(helpers.to_bf16, -x, torch.bfloat16, device), -want)


def test_to_bf16_keeps_nan(device):
    x = floats([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0x7FC00000])
    assert apply(helpers.to_bf16, x, torch.bfloat16, device).isnan().all()


def test_quantise_e4m3_saturates_and_keeps_nan(device):
    x = torch.tensor([448.0, 449.0, 463.9, 464.0, 500.0, 1e30, math.inf, math.nan])
    got = apply(helpers.quantise_e4m3, torch.cat([x, -x]), E4M3, device).float()
    assert torch.equal(got[:7], torch.full((7,), 448.0))
    assert torch.equal(got[8:15], torch.full((7,), -448.0))
    assert got[7].isnan()
    assert got[15].isnan()


def test_quantise_e4m3_rounds_every_midpoint_to_even(device):
    grid = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    middle = ((grid[1:] + grid[:-1]) / 2).numpy()
    x = around(middle)
    codes = torch.arange(126)
    want = torch.cat([codes + codes % 2, codes + 1, codes]).to(torch.uint8)
    assert torch.equal(apply(helpers.quantise_e4m3, x, E4M3, device).view(torch.uint8), want)
    assert torch.equal(apply(helpers.quantise_e4m3, -x, E4M3, device).view(torch.uint8), want + 128)


def test_quantise_e4m3_leaves_every_code_where_it_is(device):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F]
    assert torch.equal(
        apply(helpers.quantise_e4m3, finite.view(E4M3).float(), E4M3, device).view(torch.uint8), finite
    )


def test_e4m3_scale(device):
    amax = torch.cat([torch.tensor([0.0, -0.0, 448.0, 1.0, 1e-45, FP32_MAX]), torch.rand(200) * 1e3])
    quotient = amax.numpy() / np.float32(448)
    want = np.where(quotient == 0, np.float32(1), quotient)  # also of the subnormal
    assert torch.equal(apply(helpers.e4m3_scale, amax, torch.float32, device), torch.from_numpy(want))


def test_true_div_is_rounded_to_nearest(device):
    rng = np.random.default_rng(0)
    a = rng.standard_normal(4096).astype(np.float32) * 2.0 ** rng.integers(-60, 60, 4096)
    b = rng.standard_normal(4096).astype(np.float32) * 2.0 ** rng.integers(-60, 60, 4096)
    a, b = torch.from_numpy(a.astype(np.float32)), torch.from_numpy(b.astype(np.float32))
    y = torch.empty(4096, device=device)
    with launch_context(device):
        map2_kernel[(1,)](a.to(device), b.to(device), y, F=helpers.true_div, N=4096)
    # a float64 quotient of fp32 numbers rounds to fp32 as the exact one does: 53 >= 2 * 24 + 2 bits
    assert torch.equal(y.cpu(), (a.double() / b.double()).float())


def test_decode_e8m0_every_code(device):
    got = apply(
        helpers.decode_e8m0, torch.arange(256, dtype=torch.int32).to(torch.uint8), torch.float32, device
    )
    assert got[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert got[255].isnan()


def mxfp8_code(amax: float) -> int:
    """ceil(log2(amax / 448)) + 127 in [1, 254], in exact integers."""
    numerator, denominator = amax.as_integer_ratio()
    e = -200
    while numerator > 448 * denominator * 2**e if e >= 0 else numerator * 2**-e > 448 * denominator:
        e += 1
    return min(max(e + 127, 1), 254)


def test_mxfp8_scale_known_codes(device):
    amax = torch.tensor([448.0, 449.0, 1.0, 0.0, 1e-45, 896.0, FP32_MAX, math.inf, math.nan])
    got = apply(helpers.mxfp8_scale, amax, torch.uint8, device)
    assert got.tolist() == [127, 128, 119, 1, 1, 128, 247, 254, 254]


def test_mxfp8_scale_at_every_step(device):
    steps = [math.ldexp(1.75, e) for e in range(-126, 128)] + [math.ldexp(1.0, e) for e in range(-126, 128)]
    x = around(steps)
    got = apply(helpers.mxfp8_scale, x, torch.uint8, device)
    assert got.tolist() == [mxfp8_code(v) for v in x.tolist()]


@given(st.lists(st.floats(0, FP32_MAX, width=32), min_size=1, max_size=64))
def test_mxfp8_scale_is_the_ceiling(amax):
    x = torch.tensor(amax)
    got = apply(helpers.mxfp8_scale, x, torch.uint8, torch.device("cpu"))
    assert got.tolist() == [mxfp8_code(v) for v in x.tolist()]


@triton.jit
def mxfp8_kernel(x_ptr, y_ptr, N: tl.constexpr):
    """Quantise one scale block and decode it again."""
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    code = helpers.mxfp8_scale(tl.max(tl.abs(x), axis=0)).to(tl.int32)
    q = helpers.quantise_e4m3(x * helpers.decode_e8m0(254 - code))
    tl.store(y_ptr + i, q.to(tl.float32) * helpers.decode_e8m0(code))


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1.0, 447.0, 449.0, 1e30])
def test_mxfp8_round_trip_never_saturates(size, device):
    x = (torch.randn(32) * size).to(device)
    y = torch.empty_like(x)
    with launch_context(device):
        mxfp8_kernel[(1,)](x, y, N=32)
    # half a step of three fraction bits; below the normal range half of 2^-9 scales, and 448 scales < 2 amax
    bound = torch.maximum(x.abs() / 16, x.abs().max() * 2 / 448 * 2**-10)
    assert ((x - y).abs() <= bound).all()


def test_swiglu_oai(device):
    gate = torch.cat([torch.linspace(-40, 40, 500), torch.tensor([7.0, 7.5, -7.5, 0.0, -math.inf, 1e30])])
    up = torch.cat([torch.randn(500) * 6, torch.tensor([7.5, -7.5, 7.0, -7.0, 1.0, -1e30])])
    want = gate.double().clamp(max=7.0)
    want = want * torch.sigmoid(1.702 * want) * (up.double().clamp(-7.0, 7.0) + 1.0)
    want[504] = math.nan  # -inf * sigmoid(-inf) is -inf * 0
    g, u = padded(gate).to(device), padded(up).to(device)
    y = torch.empty_like(g)
    with launch_context(device):
        swiglu_kernel[(1,)](g, u, y, 1.702, 1.0, 7.0, N=len(g))
    y = y[: len(gate)].cpu().double()
    assert y[504].isnan()
    # exp(x) loses |x| * 2^-24 when x * log2(e) is rounded, and a few ulp in the approximations after it
    bound = (8 + 2 * 1.702 * gate.double().abs().clamp(max=40)) * 2.0**-24 * want.abs() + 1e-37
    finite = torch.arange(len(gate)) != 504
    assert ((y - want).abs() <= bound)[finite].all()


def test_swiglu_oai_passes_nan_on(device):
    gate, up = torch.tensor([math.nan, 1.0]).to(device), torch.tensor([1.0, math.nan]).to(device)
    y = torch.zeros(2, device=device)
    with launch_context(device):
        swiglu_kernel[(1,)](gate, up, y, 1.702, 1.0, 7.0, N=2)
    assert y.isnan().all()


CASES = {
    "to_bf16": (torch.float32, torch.bfloat16),
    "quantise_e4m3": (torch.float32, E4M3),
    "e4m3_scale": (torch.float32, torch.float32),
    "decode_e8m0": (torch.uint8, torch.float32),
    "mxfp8_scale": (torch.float32, torch.uint8),
}


@pytest.mark.parametrize("name", CASES)
def test_compiles(name, compile_target):
    constexprs = {"F": getattr(helpers, name), "N": 1024}
    compiled = compile_kernel(map_kernel, CASES[name], constexprs, compile_target, num_warps=4)
    assert compiled.spills == 0
    assert not compiled.matches(r"\.ftz")  # subnormal scales must not become zero


def test_true_div_and_swiglu_compile(compile_target):
    f32 = torch.float32
    div = compile_kernel(map2_kernel, (f32, f32, f32), {"F": helpers.true_div, "N": 1024}, compile_target)
    swiglu = compile_kernel(swiglu_kernel, (f32, f32, f32, 1.702, 1.0, 7.0), {"N": 1024}, compile_target)
    assert div.spills == swiglu.spills == 0
    if compile_target.backend == "cuda":
        assert div.matches(r"div\.rn\.f32")
        assert not div.matches(r"div\.full")
    else:
        assert div.matches(r"v_div_fixup_f32")  # AMD's exact division ends in it
