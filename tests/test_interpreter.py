"""The interpreter's own probes: unless it rounds, checks and orders as it says, no kernel test counts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from compile_harness import capture_check, compile_kernel, compiling_for

from mono.fast.interpreter import ASM, KernelMemoryError, interpret, launch_context
from mono.fast.targets import GFX942, SM90, SUPPORTED, refuse_target

E4M3 = torch.float8_e4m3fn
ORDERS = [None, "reverse", 1]


@triton.jit
def cast_kernel(x_ptr, y_ptr, N: tl.constexpr):
    """y = x in y's type."""
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, cast by a kernel on x's device; padded to a power of two for it."""
    n = triton.next_power_of_2(len(x))
    padded = torch.zeros(n * x.element_size(), dtype=torch.uint8, device=x.device)
    padded[: x.nbytes] = x.view(torch.uint8)
    y = torch.empty(n, dtype=dtype, device=x.device)
    with launch_context(x.device):
        cast_kernel[(1,)](padded.view(x.dtype), y, N=n)
    return y[: len(x)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal values and signs, NaN equal to NaN."""
    a, b = a.double(), b.double()
    return torch.equal(a.nan_to_num(1e300), b.nan_to_num(1e300)) and torch.equal(
        torch.signbit(a) | a.isnan(), torch.signbit(b) | b.isnan()
    )


def e4m3_values() -> list[float]:
    """The finite values of e4m3 from 0 up, by definition: 4 exponent bits of bias 7, 3 fraction bits."""
    subnormal = [f / 8 * 2.0**-6 for f in range(8)]
    normal = [(1 + f / 8) * 2.0 ** (e - 7) for e in range(1, 16) for f in range(8)]
    return (subnormal + normal)[:127]  # the last pattern is NaN


def round_to_e4m3(x: float) -> float:
    """Nearest e4m3 value, ties to the even code, saturating at 448."""
    if math.isnan(x):
        return x
    grid = e4m3_values()
    size = min(abs(x), 448.0)
    code = min(range(127), key=lambda c: (abs(grid[c] - size), c % 2))
    return math.copysign(grid[code], x)


def all_bf16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


# rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_e4m3_code_widens_exactly(dtype):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(E4M3)
    want = torch.tensor([*e4m3_values(), math.nan])
    assert same(cast(codes, dtype), torch.cat([want, -want]))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_e4m3_midpoints_round_to_even(source):
    grid = e4m3_values()
    middle = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(grid)])
    x = torch.cat([middle, -middle]).to(source)
    assert torch.equal(x.float(), torch.cat([middle, -middle]))  # the source type holds every midpoint
    assert same(cast(x, E4M3), torch.tensor([round_to_e4m3(v) for v in x.tolist()]))


def test_e4m3_just_beside_a_midpoint_does_not_tie():
    grid = e4m3_values()
    middle = np.array([(a + b) / 2 for a, b in itertools.pairwise(grid)], np.float32)
    above, below = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(0))
    assert same(cast(torch.from_numpy(above), E4M3), torch.tensor(grid[1:]))
    assert same(cast(torch.from_numpy(below), E4M3), torch.tensor(grid[:-1]))


def test_every_bf16_code_rounds_to_e4m3():
    x = all_bf16()
    grid = torch.tensor(e4m3_values(), dtype=torch.float64)
    size = x.double().abs().nan_to_num(0.0, posinf=448.0).clamp(max=448.0)
    upper = torch.searchsorted(grid, size).clamp(max=126)
    lower = (upper - 1).clamp(min=0)
    to_upper, to_lower = grid[upper] - size, size - grid[lower]
    even_upper = upper % 2 == 0
    code = torch.where((to_upper < to_lower) | ((to_upper == to_lower) & even_upper), upper, lower)
    want = torch.where(x.double().isnan(), math.nan, torch.copysign(grid[code], x.double()))
    assert same(cast(x, E4M3), want)


@pytest.mark.parametrize("x", [448.0, 449.0, 464.0, 465.0, 500.0, 1e30, math.inf, math.nan])
def test_e4m3_saturates_and_keeps_nan(x):
    got = cast(torch.tensor([x, -x]), E4M3)
    assert same(got, torch.tensor([round_to_e4m3(x), -round_to_e4m3(x)]))


def test_every_bf16_code_survives_fp32():
    x = all_bf16()
    wide = cast(x, torch.float32)
    assert same(wide, x)
    assert same(cast(wide, torch.bfloat16), x)


def test_fp32_rounds_to_bf16_and_fp16_by_nearest_even():
    kept = torch.arange(0, 65536, 7)
    bits = (kept[:, None] << 16) + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = bits.reshape(-1).to(torch.uint32).view(torch.float32)
    # torch's casts are round to nearest even; numpy has fp16 of its own
    assert same(cast(x, torch.bfloat16), x.bfloat16())
    with np.errstate(over="ignore"):
        assert same(cast(x, torch.float16), torch.from_numpy(x.numpy().astype(np.float16)))


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    """x + y, x * y, max, where and -x in the type itself."""
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + N + i, x * y)
    tl.store(out_ptr + 2 * N + i, tl.where(x < y, x, -y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_arithmetic_rounds_each_result(dtype):
    x, y = torch.randn(256).to(dtype), torch.randn(256).to(dtype)
    out = torch.empty(3, 256, dtype=dtype)
    with interpret():
        arithmetic_kernel[(1,)](x, y, out, N=256)
    want = [x.double() + y.double(), x.double() * y.double(), torch.where(x < y, x.double(), -y.double())]
    assert torch.equal(out, torch.stack(want).float().to(dtype))


# dots


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c = a @ b."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(c_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, out_dtype=c_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3, torch.float8_e5m2, torch.int8])
def test_dot(dtype):
    M, N, K = 16, 32, 64
    # small integers: every product and every partial sum is exact in fp32, so no order of sums can differ
    a, b = torch.randint(-8, 9, (M, K)), torch.randint(-8, 9, (K, N))
    c = torch.empty(M, N, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
    with interpret():
        dot_kernel[(1,)](a.float().to(dtype), b.float().to(dtype), c, M, N, K)
    want = a.float().to(dtype).double() @ b.float().to(dtype).double()
    assert torch.equal(c.double(), want)


@triton.jit
def dot_scaled_kernel(a_ptr, as_ptr, b_ptr, bs_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c = (a * 2^(as - 127)) @ (b * 2^(bs - 127)), a e4m3 and b packed e2m1, 32 values of K to a scale."""
    m, n = tl.arange(0, M), tl.arange(0, N)
    k, half, block = tl.arange(0, K), tl.arange(0, K // 2), tl.arange(0, K // 32)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    a_scale = tl.load(as_ptr + m[:, None] * (K // 32) + block[None, :])
    b = tl.load(b_ptr + n[None, :] * (K // 2) + half[:, None])
    b_scale = tl.load(bs_ptr + n[:, None] * (K // 32) + block[None, :])
    c = tl.dot_scaled(a, a_scale, "e4m3", b, b_scale, "e2m1")
    tl.store(c_ptr + m[:, None] * N + n[None, :], c)


def test_dot_scaled():
    M, N, K = 16, 32, 64
    a = torch.randint(-8, 9, (M, K)).float().to(E4M3)
    a_scale = torch.randint(126, 129, (M, K // 32), dtype=torch.uint8)
    b = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
    b_scale = torch.randint(126, 129, (N, K // 32), dtype=torch.uint8)
    c = torch.empty(M, N)
    with interpret():
        dot_scaled_kernel[(1,)](a, a_scale, b, b_scale, c, M, N, K)
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    e2m1 = torch.cat([e2m1, -e2m1])
    wide_b = torch.stack([e2m1[(b & 15).long()], e2m1[(b >> 4).long()]], dim=-1).reshape(N, K)
    wide_a = a.double() * (2.0 ** (a_scale.double() - 127)).repeat_interleave(32, dim=1)
    wide_b = wide_b * (2.0 ** (b_scale.double() - 127)).repeat_interleave(32, dim=1)
    assert torch.equal(c.double(), wide_a @ wide_b.T)  # small dyadic numbers: exact in fp32 in any order


# reductions


@triton.jit
def _larger_magnitude(a, b):
    return tl.where(tl.abs(a) >= tl.abs(b), a, b)


@triton.jit
def _append(a, b):
    """Associative, but not commutative: keeps the right operand unless it is zero."""
    return tl.where(b == 0, a, b)


@triton.jit
def reduce_kernel(x_ptr, out_ptr, R: tl.constexpr, C: tl.constexpr):
    i, j = tl.arange(0, R), tl.arange(0, C)
    x = tl.load(x_ptr + i[:, None] * C + j[None, :])
    tl.store(out_ptr + i, tl.sum(x, axis=1))
    tl.store(out_ptr + R + i, tl.max(x, axis=1))
    tl.store(out_ptr + 2 * R + i, tl.argmax(x, axis=1).to(tl.float32))
    tl.store(out_ptr + 3 * R + i, tl.reduce(x, 1, _larger_magnitude))
    tl.store(out_ptr + 4 * R + i, tl.reduce(x, 1, _append))
    last = tl.associative_scan(x, 1, _append)
    tl.store(out_ptr + 5 * R + i, tl.sum(tl.where(j[None, :] == C // 2, last, 0.0), axis=1))
    tl.store(out_ptr + 6 * R + i, tl.sum(tl.where(j[None, :] == C // 2, tl.cumsum(x, 1), 0.0), axis=1))


def test_reductions_and_scans():
    R, C = 8, 32
    x = torch.randint(-50, 51, (R, C)).float()  # integers: sums are exact
    x[:, 9:20:3] = 0
    out = torch.empty(7, R)
    with interpret():
        reduce_kernel[(1,)](x, out, R, C)
    assert torch.equal(out[0], x.sum(1))
    assert torch.equal(out[1], x.max(1).values)
    assert torch.equal(out[2], torch.tensor([row.index(max(row)) for row in x.tolist()]).float())
    assert torch.equal(out[3].abs(), x.abs().max(1).values)
    assert torch.equal(out[4], torch.tensor([[v for v in row if v][-1] for row in x.tolist()]))
    upto = [[v for v in row[: C // 2 + 1] if v][-1] for row in x.tolist()]
    assert torch.equal(out[5], torch.tensor(upto))
    assert torch.equal(out[6], x[:, : C // 2 + 1].sum(1))


def test_max_passes_over_nan_as_hardware_does():
    x = torch.tensor([[1.0, math.nan, 3.0, 2.0]] * 8)
    out = torch.empty(7, 8)
    with interpret():
        reduce_kernel[(1,)](x, out, 8, 4)
    assert torch.equal(out[1], torch.full((8,), 3.0))


@triton.jit
def sort_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.sort(tl.load(x_ptr + i)))


def test_sort():
    x, y = torch.randn(64), torch.empty(64)
    with interpret():
        sort_kernel[(1,)](x, y, N=64)
    assert torch.equal(y, x.sort().values)


# memory


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """y = x, BLOCK elements a program."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n, other=0.0), mask=i < n)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, E4M3])
@pytest.mark.parametrize("order", ORDERS)
def test_copy_in_any_program_order(dtype, order):
    x = torch.randint(-100, 100, (100,)).float().to(dtype)
    y = torch.zeros(100).to(dtype)
    with interpret(races=True, poison=True, order=order):
        copy_kernel[(7,)](x, y, 100, BLOCK=16)
    assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_load_out_of_bounds():
    x, y = torch.zeros(100), torch.zeros(128)
    with (
        interpret(),
        pytest.raises(KernelMemoryError, match=r"load out of bounds in program \(6, 0, 0\): 12 of 16"),
    ):
        copy_kernel[(8,)](x, y, 128, BLOCK=16)


@pytest.mark.parametrize("past", ["x", "y"])
def test_one_element_past_the_end(past):
    x, y = torch.zeros(16 if past == "x" else 17), torch.zeros(16 if past == "y" else 17)
    kind = "load" if past == "x" else "store"
    with (
        interpret(),
        pytest.raises(KernelMemoryError, match=f"{kind} out of bounds .*: 1 of 17 .* byte 64 of .* 64"),
    ):
        copy_kernel[(1,)](x, y, 17, BLOCK=32)


def test_store_out_of_bounds_of_a_view_is_seen():
    whole = torch.zeros(256)
    with interpret(), pytest.raises(KernelMemoryError, match="store out of bounds"):
        copy_kernel[(8,)](torch.zeros(128), whole[:100], 128, BLOCK=16)
    assert not whole[100:].any()


def test_masked_lanes_may_point_anywhere():
    x, y = torch.ones(100), torch.zeros(100)
    with interpret():
        copy_kernel[(1,)](x, y, 100, BLOCK=1024)
    assert torch.equal(x, y)


def test_misaligned():
    raw = torch.zeros(65, dtype=torch.uint8)
    with interpret(), pytest.raises(KernelMemoryError, match="misaligned load"):
        offset_kernel[(1,)](raw, torch.zeros(16))


@triton.jit
def offset_kernel(raw_ptr, y_ptr):
    """Reads fp32 one byte off."""
    i = tl.arange(0, 16)
    tl.store(y_ptr + i, tl.load((raw_ptr + 1).to(tl.pointer_type(tl.float32)) + i))


@triton.jit
def address_kernel(table_ptr, y_ptr, N: tl.constexpr):
    """Reads the tensor whose address the table holds."""
    i = tl.arange(0, N)
    x_ptr = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr + i, tl.load(x_ptr + i))


def test_extra_tensors_are_within_bounds():
    x, y = torch.randn(16), torch.zeros(16)
    table = torch.tensor([x.data_ptr()])
    with interpret(), pytest.raises(KernelMemoryError, match="load out of bounds"):
        address_kernel[(1,)](table, y, N=16)
    with interpret(extra=[x]):
        address_kernel[(1,)](table, y, N=16)
    assert torch.equal(x, y)


@triton.jit
def no_other_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Stores lanes that no load has set."""
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3])
def test_poison_fills_unset_lanes(dtype):
    x, y = torch.ones(16).to(dtype), torch.ones(16).to(dtype)
    with interpret(poison=True):
        no_other_kernel[(1,)](x, y, 9, BLOCK=16)
    assert y.float()[:9].eq(1).all()
    assert y.float()[9:].isnan().all()
    with interpret():
        no_other_kernel[(1,)](x, y, 9, BLOCK=16)
    assert y.float()[9:].eq(0).all()


@triton.jit
def other_kernel(x_ptr, y_ptr, n, other, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n, other=other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3, torch.int32])
@pytest.mark.parametrize("other", [0, 3])
@pytest.mark.parametrize("block", [1, 2])
def test_other_fills_a_tile_of_one_element_too(dtype, other, block):
    x, y = torch.ones(block).to(dtype), torch.full((block,), 5.0).to(dtype)
    with interpret(poison=True):
        other_kernel[(1,)](x, y, 0, other, BLOCK=block)
        assert y.float().eq(other).all()
        other_kernel[(1,)](x, y, block, other, BLOCK=block)
    assert y.float().eq(1).all()


@triton.jit
def one_by_one_kernel(x_ptr, y_ptr, K: tl.constexpr):
    """Sums a row that is addressed by [1, 1] + [K]."""
    row = x_ptr + tl.arange(0, 1)[:, None]
    values = tl.load(row + tl.arange(0, K))
    tl.store(y_ptr + tl.arange(0, 1), tl.sum(values, axis=1))


def test_a_pointer_of_one_by_one_keeps_its_dimensions():
    x, y = torch.arange(8.0), torch.zeros(1)
    with interpret():
        one_by_one_kernel[(1,)](x, y, K=8)
    assert y.item() == 28.0


@triton.jit
def plain_add_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + 1.0)


@triton.jit
def store_kernel(x_ptr):
    tl.store(x_ptr, 1.0)


@triton.jit
def atomic_add_kernel(x_ptr):
    tl.atomic_add(x_ptr, 1.0)


@triton.jit
def read_next_kernel(x_ptr, y_ptr):
    """Each program stores its own element of x and reads its neighbour's."""
    pid = tl.program_id(0)
    tl.store(x_ptr + pid, 1.0)
    tl.store(y_ptr + pid, tl.load(x_ptr + (pid + 1) % tl.num_programs(0)))


@triton.jit
def read_back_kernel(x_ptr, y_ptr, BARRIER: tl.constexpr):
    i = tl.arange(0, 16)
    tl.store(x_ptr + i, 1.0)
    if BARRIER:
        tl.debug_barrier()
    tl.store(y_ptr + i, tl.load(x_ptr + 15 - i))


@triton.jit
def last_arrives_kernel(part_ptr, count_ptr, out_ptr, N: tl.constexpr):
    """The last program to arrive sums what all have stored."""
    pid = tl.program_id(0)
    tl.store(part_ptr + pid, (pid + 1).to(tl.float32))
    if tl.atomic_add(count_ptr, 1, sem="acq_rel") == N - 1:
        tl.store(out_ptr, tl.sum(tl.load(part_ptr + tl.arange(0, N)), axis=0))


def test_races():
    x, y = torch.zeros(16), torch.zeros(16)
    with interpret(races=True):
        with pytest.raises(KernelMemoryError, match="programs 0 and 1 store to one address"):
            store_kernel[(2,)](x)
        with pytest.raises(KernelMemoryError, match="program 1 reads what program 0 stores"):
            plain_add_kernel[(2,)](x)
        with pytest.raises(KernelMemoryError, match="program 1 overwrites what another program reads"):
            read_next_kernel[(4,)](x, y)
        with (
            interpret(races=True, order="reverse"),
            pytest.raises(KernelMemoryError, match="2 reads what program 3 stores"),
        ):
            read_next_kernel[(4,)](x, y)
        with pytest.raises(KernelMemoryError, match="reads back its own store"):
            read_back_kernel[(1,)](x, y, BARRIER=False)
        read_back_kernel[(1,)](x, y, BARRIER=True)
        atomic_add_kernel[(2,)](y)
    assert torch.equal(y, torch.tensor([3.0] + [1.0] * 15))


@pytest.mark.parametrize("order", ORDERS)
def test_the_last_program_to_arrive_may_read_the_others(order):
    part, count, out = torch.zeros(8), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    with interpret(races=True, order=order):
        last_arrives_kernel[(8,)](part, count, out, N=8)
    assert out.item() == 36.0


# launching


@triton.jit
def place_kernel(y_ptr, order_ptr, counter_ptr):
    """Notes when each program of a 3-D grid ran."""
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(order_ptr + place, tl.atomic_add(counter_ptr, 1))
    tl.store(y_ptr + place, x * 100 + y * 10 + z)


def test_three_orders_visit_every_program_once():
    seen = []
    for order in ORDERS:
        y, when = torch.zeros(24, dtype=torch.int32), torch.zeros(24, dtype=torch.int32)
        with interpret(races=True, order=order):
            place_kernel[lambda meta: (2, 3, 4)](y, when, torch.zeros(1, dtype=torch.int32))
        assert y.tolist() == [100 * a + 10 * b + c for a in range(2) for b in range(3) for c in range(4)]
        assert sorted(when.tolist()) == list(range(24))
        seen.append(when.tolist())
    assert seen[0] == list(range(24))
    assert seen[1] == list(range(23, -1, -1))
    assert seen[2] not in (seen[0], seen[1])


def test_unknown_order():
    with interpret(order="sideways"), pytest.raises(ValueError, match="sideways"):
        copy_kernel[(1,)](torch.zeros(16), torch.zeros(16), 16, BLOCK=16)


@triton.jit
def scalar_kernel(y_ptr, a, b, c, FLAG: tl.constexpr = 3):
    tl.store(y_ptr, a / b)
    tl.store(y_ptr + 1, c + FLAG)


def test_float_arguments_are_fp32():
    y = torch.zeros(2)
    with interpret():
        scalar_kernel[(1,)](y, 0.1, 0.3, c=2)
    assert y[0].item() == float(np.float32(0.1) / np.float32(0.3))
    assert y[1].item() == 5.0


def test_missing_argument_is_named():
    with interpret(), pytest.raises(TypeError, match="scalar_kernel: no value for b, c"):
        scalar_kernel[(1,)](torch.zeros(2), 0.1)


def test_tensors_elsewhere_are_refused():
    x = torch.zeros(16, device="meta")
    with interpret(), pytest.raises(ValueError, match="one is on meta"):
        copy_kernel[(1,)](x, x, 16, BLOCK=16)


@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 32})], key=["n"])
@triton.jit
def tuned_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n, other=0.0), mask=i < n)


def test_autotuned_kernels_take_their_first_config():
    x, y = torch.randn(100), torch.zeros(100)
    with interpret():
        tuned_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, y, 100)
    assert torch.equal(x, y)


@triton.jit
def asm_kernel(x_ptr, y_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, tl.inline_asm_elementwise("neg.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1))


def test_inline_assembly_needs_an_emulation(monkeypatch):
    x, y = torch.randn(16), torch.zeros(16)
    with interpret(), pytest.raises(NotImplementedError, match=r"neg\.f32"):
        asm_kernel[(1,)](x, y)
    monkeypatch.setitem(ASM, "neg.f32 $0, $1;", np.negative)
    with interpret():
        asm_kernel[(1,)](x, y)
    assert torch.equal(y, -x)


def test_launch_context():
    x, y = torch.randn(16), torch.zeros(16)
    with launch_context(x.device):
        copy_kernel[(1,)](x, y, 16, BLOCK=16)
    assert torch.equal(x, y)
    # inside interpret() the outer settings stay
    with interpret(races=True), launch_context(x.device), pytest.raises(KernelMemoryError, match="race"):
        plain_add_kernel[(2,)](x)
    # elsewhere it does nothing: meta tensors reach Triton itself
    with launch_context(torch.device("meta")), compiling_for(SM90):
        assert tl.load.__module__ == "triton.language.core"


def test_an_error_in_a_kernel_leaves_triton_as_it_was():
    before = (triton.runtime.JITFunction.run, tl.load, tl.core.tensor.__init__, tl.core.block_type.__init__)
    with pytest.raises(KernelMemoryError), interpret():
        copy_kernel[(8,)](torch.zeros(10), torch.zeros(128), 128, BLOCK=16)
    after = (triton.runtime.JITFunction.run, tl.load, tl.core.tensor.__init__, tl.core.block_type.__init__)
    assert before == after
    assert not triton.knobs.runtime.interpret


def test_a_kernel_keeps_its_module_clean():
    assert "interpreter_semantic" not in copy_kernel.fn.__globals__


# compiling in the same process


def test_compiles_between_interpretations(compile_target):
    args, constexprs = (torch.float32, torch.float32, 100), {"BLOCK": 128}
    x, y = torch.randn(100), torch.zeros(100)
    for _ in range(2):
        with interpret():
            copy_kernel[(1,)](x, y, 100, BLOCK=128)
            compiled = compile_kernel(copy_kernel, args, constexprs, compile_target, num_warps=4)
        assert torch.equal(x, y)
        assert compiled.spills == 0
        assert 0 < compiled.registers < 64


def test_compiled_dot_uses_matrix_instructions(compile_target):
    args = (torch.bfloat16, torch.bfloat16, torch.float32)
    compiled = compile_kernel(dot_kernel, args, {"M": 64, "N": 16, "K": 64}, compile_target, num_warps=4)
    expected = {
        "sm_90": r"wgmma\.mma_async\S*bf16",
        "sm_100": r"tcgen05\.mma|mma\.sync\S*bf16",
        "gfx950": r"v_mfma\S*bf16",
    }
    assert compiled.matches(expected[compile_target.name])
    assert 0 < compiled.shared <= compile_target.shared_memory


@triton.jit
def undefined_name_kernel(y_ptr):
    tl.store(y_ptr, np.float32(1.0))  # no global but a constexpr is known to Triton


def test_the_compiler_refuses_what_python_accepts():
    with pytest.raises(triton.compiler.errors.CompilationError):
        compile_kernel(undefined_name_kernel, (torch.float32,), {}, SM90)


@triton.jit
def big_dot_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    acc = tl.zeros((M, N), tl.float32)
    for k0 in tl.range(0, 4096, K, num_stages=5):
        k = k0 + tl.arange(0, K)
        a, b = (
            tl.load(a_ptr + m[:, None] * 4096 + k[None, :]),
            tl.load(b_ptr + n[None, :] * 4096 + k[:, None]),
        )
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc)


def test_too_much_shared_memory_is_an_error():
    args = (torch.bfloat16, torch.bfloat16, torch.float32)
    with pytest.raises(AssertionError, match="sm_90 has 232448"):
        compile_kernel(big_dot_kernel, args, {"M": 128, "N": 256, "K": 128}, SM90, num_warps=8)


def test_gfx942_is_refused():
    assert "gfx942" not in SUPPORTED
    assert "fnuz" in refuse_target(GFX942)
    with pytest.raises(ValueError, match="gfx942 computes in float8_e4m3fnuz"):
        compile_kernel(copy_kernel, (torch.float32, torch.float32, 100), {"BLOCK": 128}, GFX942)


def test_capture_check_lists_launches_and_rejects_host_reads():
    with capture_check(SM90) as launches, torch.device("meta"):
        x, y = torch.empty(4096), torch.empty(4096)
        copy_kernel[(triton.cdiv(4096, 1024),)](x, y, 4096, BLOCK=1024)
        copy_kernel[lambda meta: (4096 // meta["BLOCK"],)](y, x, 4096, BLOCK=512)
        with pytest.raises(RuntimeError, match="meta tensors"):
            x.max().item()
        with pytest.raises(RuntimeError, match="meta tensors"):
            copy_kernel[(int(x.sum()),)](x, y, 4096, BLOCK=1024)
    assert launches == [("copy_kernel", (4,)), ("copy_kernel", (8,))]


@pytest.mark.gpu
def test_gpu_casts_equal_interpreted_casts():
    middle = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(e4m3_values())])
    for x in (all_bf16(), torch.cat([middle, -middle, torch.tensor([math.nan])])):
        x = x.clamp(-448, 448)  # as every kernel does before the cast
        assert same(cast(x.cuda(), E4M3).cpu(), cast(x, E4M3))
        third = x.float() / 3
        assert same(cast(third.cuda(), torch.bfloat16).cpu(), cast(third, torch.bfloat16))
