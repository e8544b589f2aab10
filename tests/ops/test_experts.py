"""MXFP4 experts: exact products over the whole format, and every stage against the reference."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from compiled_launches import compiled_launches, meta
from hypothesis import given
from hypothesis import strategies as st
from strict import ORDERS, on_devices, strict, ulps
from torch import Tensor

from mono.fast.interpreter import interpret
from mono.fast.launch import launch
from mono.fast.ops import experts as fast
from mono.fast.ops.device import decode_mxfp4
from mono.formats import Mxfp4, mxfp4, mxfp8
from mono.reference.ops.linear import linear
from mono.reference.ops.swiglu import swiglu_oai

SWIGLU = (1.702, 1.0, 7.0)
# typed by hand from the MX specification
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def packed(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] to bytes, the even k in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def slots_of(ids: Tensor, table: int) -> Tensor:
    """[table, T]: the slot in which a row of ids [T, slots] chose an expert, or -1."""
    slot_of = torch.full((table, len(ids)), -1, dtype=torch.int32)
    for t, row in enumerate(ids.tolist()):
        for slot, e in enumerate(row):
            if e >= 0:
                slot_of[e, t] = slot
    return slot_of


def product(device: str, x: Tensor, matrix: Mxfp4) -> Tensor:
    """x [T, K] times one matrix [N, K], through the down kernel: fp32 [T, N]."""
    everyone = torch.zeros(1, len(x), dtype=torch.int32)
    table = Mxfp4(matrix.packed[None], matrix.scale[None])
    with strict(device):
        y = fast.down(x[:, None].contiguous().to(device), table.to(device), everyone.to(device))
    return y[:, 0].cpu()


@triton.jit
def decode_kernel(packed_ptr, scale_ptr, even_ptr, odd_ptr, M: tl.constexpr, HALF: tl.constexpr):
    m, k, g = tl.arange(0, M)[:, None], tl.arange(0, HALF)[None, :], tl.arange(0, HALF // 16)[None, :]
    w = tl.load(packed_ptr + m * HALF + k)
    even, odd = decode_mxfp4(w, tl.load(scale_ptr + m * (HALF // 16) + g))
    tl.store(even_ptr + m * HALF + k, even)
    tl.store(odd_ptr + m * HALF + k, odd)


@on_devices
def test_every_code_under_every_scale_decodes_exactly(device: str) -> None:
    """All 256 bytes under all 256 scales, minus zero, subnormals, infinities and NaN included."""
    table = torch.tensor(E2M1)
    scale = torch.exp2(torch.arange(256).double() - 127)  # [256]
    scale[255] = torch.nan
    byte = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # [scale, byte]
    codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    even, odd = (torch.empty(256, 256, dtype=torch.bfloat16, device=device) for _ in range(2))
    with strict(device):
        launch(
            decode_kernel, (1,), even.device, byte.to(device), codes.to(device), even, odd,
            M=256, HALF=256, num_warps=8,
        )  # fmt: skip
    for got, nibble in ((even, byte.int() & 15), (odd, byte.int() >> 4)):
        want = (table[nibble].double() * scale[:, None]).float().bfloat16()
        assert torch.equal(ulps(got, want), torch.zeros(256, 256))
        assert torch.equal(got.cpu().signbit()[:255], want.signbit()[:255])


@on_devices
@pytest.mark.parametrize("column", [6, 11])  # in a low and in a high nibble
def test_every_code_and_scale_multiplies_exactly(device: str, column: int) -> None:
    codes = torch.zeros(16 * 256, 32, dtype=torch.uint8)
    codes[:, column] = torch.arange(16).repeat_interleave(256)
    scale = torch.arange(256, dtype=torch.uint8).repeat(16)
    x = torch.zeros(2, 32).bfloat16()
    x[:, column] = torch.tensor([1.0, -1.5])
    got = product(device, x, Mxfp4(packed(codes), scale[:, None]))
    value = torch.tensor(E2M1).repeat_interleave(256).double() * torch.exp2(scale.double() - 127)
    value[scale == 255] = torch.nan
    want = torch.stack([value, -1.5 * (value.float().double())]).float()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@on_devices
def test_ends_of_the_scale_are_ordinary_numbers(device: str) -> None:
    ones = packed(torch.full((5, 32), 2, dtype=torch.uint8))
    small = product(device, torch.full((1, 32), 2.0**120).bfloat16(), Mxfp4(ones, torch.zeros(5, 1).byte()))
    assert small.tolist() == [[0.25] * 5]
    large = product(
        device, torch.full((1, 32), 2.0**-125).bfloat16(), Mxfp4(ones, torch.full((5, 1), 254).byte())
    )
    assert large.tolist() == [[128.0] * 5]
    scale = torch.full((5, 1), 127, dtype=torch.uint8)
    scale[3] = 255
    spoilt = product(device, torch.ones(2, 32).bfloat16(), Mxfp4(ones, scale))
    assert spoilt.isnan().tolist() == [[False, False, False, True, False]] * 2


@on_devices
def test_nibbles_are_read_low_first(device: str) -> None:
    """Byte 0x21 is codes 1 and 2, values 0.5 and 1: with x = (1, 10) that is 10.5; high first gives 6."""
    matrix = Mxfp4(torch.zeros(1, 16, dtype=torch.uint8), torch.full((1, 1), 127, dtype=torch.uint8))
    matrix.packed[0, 0] = 0x21
    x = torch.zeros(1, 32).bfloat16()
    x[0, :2] = torch.tensor([1.0, 10.0])
    assert product(device, x, matrix).item() == 10.5


def ragged_matrix(K: int) -> Mxfp4:
    """64 rows whose scales differ along both axes."""
    n, k, g = torch.arange(64)[:, None], torch.arange(K)[None, :], torch.arange(K // 32)[None, :]
    codes = ((7 * n + 5 * k + k // 16) % 16).to(torch.uint8)
    return Mxfp4(packed(codes), (127 + (7 * n + 3 * g) % 9 - 4).to(torch.uint8))


def ragged_rows(K: int) -> Tensor:
    m, k = torch.arange(4)[:, None], torch.arange(K)[None, :]
    return (((3 * m + k + k // 7) % 17 - 8) / 8).bfloat16()


@on_devices
@pytest.mark.parametrize("K", [32, 96, 128, 160, 256, 384, 512, 640, 768])
def test_no_width_loses_its_tail(device: str, K: int) -> None:
    """Right for every K, and where K is no multiple of 256 this input shows what a wrong tail costs."""
    x, matrix = ragged_rows(K), ragged_matrix(K)
    want = x.double() @ matrix.dequantise().double().T
    size = want.norm(dim=1)
    error = ((product(device, x, matrix).double() - want).norm(dim=1) / size).max()
    assert error < K * 2.0**-24 * 16  # fp32 sums of products 16 times their result, at most
    assert (
        (product(device, x, matrix).bfloat16().double() - want).norm(dim=1) / size
    ).max() < 2.0**-8  # half an ulp of bf16
    if K in (128, 384, 640):
        groups, padded = K // 32, (K + 255) // 256 * 8
        flat = torch.nn.functional.pad(matrix.scale.flatten(), (0, 64 * (padded - groups)), value=127)
        stride = Mxfp4(matrix.packed, flat.reshape(64, padded)[:, :groups].contiguous())
        misread = x.double() @ stride.dequantise().double().T
        assert ((misread - want).norm(dim=1) / size).max() > 0.5
        kept = K // 256 * 256
        dropped = x[:, :kept].double() @ matrix.dequantise()[:, :kept].double().T
        assert ((dropped - want).norm(dim=1) / size).max() > 0.5


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """A table of experts, rows that chose among them, weights; some rows padding, some experts unwanted."""
    T, table = draw(st.sampled_from([1, 3, 8, 17, 32])), draw(st.integers(1, 19))
    H, F = 32 * draw(st.integers(1, 5)), 32 * draw(st.integers(1, 5))
    slots = draw(st.integers(1, min(table, 5)))
    return case_of(T, table, H, F, slots, draw(st.sampled_from([1.0, 20.0])), draw(st.integers(0, 2**32 - 1)))


def case_of(T: int, table: int, H: int, F: int, slots: int, size: float, seed: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    ids = torch.stack([torch.randperm(table, generator=rng)[:slots] for _ in range(T)]).int()
    ids[torch.rand(T, generator=rng) < 0.2] = -1
    return {
        "x": mxfp8.quantise((randn(T, H) * size).bfloat16()).dequantise().bfloat16(),
        "gate_up": mxfp4.quantise(randn(table, 2 * F, H) * H**-0.5),
        "down": mxfp4.quantise(randn(table, H, F) * F**-0.5),
        "ids": ids,
        "slot_of": slots_of(ids, table),
        "weight": torch.rand(T, slots, generator=rng),
    }


def run(device: str, case: dict[str, Any], mxfp8_h: bool) -> tuple[Tensor, Tensor, Tensor]:
    c = {name: value.to(device) for name, value in case.items()}
    h = fast.gate_up(c["x"], c["gate_up"], c["slot_of"], c["ids"].shape[1], *SWIGLU, mxfp8_h)
    y = fast.down(h, c["down"], c["slot_of"])
    return h.cpu(), y.cpu(), fast.combine(y, c["ids"], c["weight"]).cpu()


@on_devices
@given(cases(), st.sampled_from(ORDERS))
def test_every_stage_is_the_reference(device: str, case: dict[str, Any], order: int | str | None) -> None:
    check_stages(device, case, order, gpu_tiles=False)


@on_devices
@pytest.mark.parametrize("gpu_tiles", [False, True])
def test_many_tiles_are_one_product(device: str, gpu_tiles: bool) -> None:
    """Several tiles of rows, experts, columns and K, the last of each cut off, with either device's tiles."""
    check_stages(device, case_of(17, 9, 544, 288, 2, 1.0, 0), None, gpu_tiles)


def check_stages(device: str, case: dict[str, Any], order: int | str | None, gpu_tiles: bool) -> None:
    """Each stage from the stage before it as the kernel left it, so that no rounding hides behind another."""
    ids, T = case["ids"], len(case["ids"])
    H, F = case["down"].shape[1:]
    with strict(device, order, gpu_tiles):
        h, y, out = run(device, case, mxfp8_h=False)
        rounded, _, _ = run(device, case, mxfp8_h=True)
    want_out = torch.zeros(T, H)
    for t in range(T):
        for slot, e in enumerate(ids[t].tolist()):
            if e < 0:
                continue
            x, w = case["x"][t : t + 1], case["gate_up"][e]
            sums = linear(x, w)
            want = swiglu_oai(sums, *SWIGLU)[0]
            # SwiGLU's slope is below 1.2 x 8 along the gate and 7 along up, and its exponential a few ulp off
            moved = (
                H * 2.0**-24 * (x.double().abs() @ w.dequantise().double().abs().T)[0].view(2, F).sum(0) * 10
            )
            allowed = moved + 2.0**-8 * want.abs() + 2.0**-20
            assert ((h[t, slot].float() - want).abs() <= allowed).all()
            again = mxfp8.quantise(h[t, slot]).dequantise().bfloat16()
            assert torch.equal(rounded[t, slot], again)
            v, row = case["down"][e].dequantise().double(), h[t, slot].double()
            assert ((y[t, slot].double() - v @ row).abs() <= F * 2.0**-24 * (v.abs() @ row.abs())).all()
            want_out[t] += y[t, slot] * case["weight"][t, slot]
    # one fused multiply-add in place of two roundings moves a sum of slots by less than an ulp of fp32 each
    torch.testing.assert_close(out.float(), want_out.bfloat16().float(), rtol=2.0**-7, atol=1e-6)
    assert torch.equal(out[(ids < 0).all(1)].float(), torch.zeros(int((ids < 0).all(1).sum()), H))


@on_devices
def test_clamps_of_swiglu_hold_in_the_kernel(device: str) -> None:
    """Gate and up far beyond the limit on both sides, in the order gate rows, up rows."""
    codes = torch.zeros(1, 64, 32, dtype=torch.uint8)
    codes[0, :32, 0], codes[0, 32:, 1] = 7, 7  # gate row: 6 x[0]; up row: 6 x[1]
    matrix = Mxfp4(packed(codes), torch.full((1, 64, 1), 127, dtype=torch.uint8))
    pairs = [(1 / 6, 1 / 6), (10.0, 10.0), (2.0, -9.0), (9.0, -9.0), (-10.0, 3.0)]
    x = torch.zeros(5, 32)
    x[:, :2] = torch.tensor(pairs)
    x = x.bfloat16()
    with strict(device):
        h = fast.gate_up(
            x.to(device),
            matrix.to(device),
            torch.zeros(1, 5, dtype=torch.int32, device=device),
            1,
            *SWIGLU,
            False,
        )
    want = swiglu_oai(6 * x[:, :2].float(), *SWIGLU).bfloat16()
    assert ulps(h[:, 0].cpu(), want.expand(5, 32)).max() <= 1


@given(cases(), st.data())
def test_a_row_does_not_depend_on_its_neighbours(case: dict[str, Any], data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(case["x"]) - 1))
    other = dict(case, x=torch.full_like(case["x"], torch.nan))
    other["x"][i] = case["x"][i]
    with strict():
        _, _, want = run("cpu", case, True)
        _, _, got = run("cpu", other, True)
    assert torch.equal(got[i], want[i])


def test_tables_beyond_two_gigabytes_are_addressed() -> None:
    """The last expert's bytes begin beyond 2^31; memory that is never touched is never there."""
    table, F, H = 40_000, 32, 2048
    near = mxfp4.quantise(torch.randn(1, 2 * F, H))
    x, slot_of = torch.randn(1, H).bfloat16(), torch.full((table, 1), -1, dtype=torch.int32)
    slot_of[-1] = 0
    far = Mxfp4(
        torch.empty(table, 2 * F, H // 2, dtype=torch.uint8),
        torch.empty(table, 2 * F, H // 32, dtype=torch.uint8),
    )
    far.packed[-1], far.scale[-1] = near.packed[0], near.scale[0]
    assert far.packed[:-1].nbytes > 2**31
    with interpret():
        got = fast.gate_up(x, far, slot_of, 1, *SWIGLU, False)
        want = fast.gate_up(x, near, torch.zeros(1, 1, dtype=torch.int32), 1, *SWIGLU, False)
    assert torch.equal(got, want)
    del far
    near = mxfp4.quantise(torch.randn(1, F, 2 * H))
    far = Mxfp4(
        torch.empty(table, F, H, dtype=torch.uint8), torch.empty(table, F, H // 16, dtype=torch.uint8)
    )
    far.packed[-1], far.scale[-1] = near.packed[0], near.scale[0]
    assert F * H * (table - 1) > 2**31
    h = torch.randn(1, 1, 2 * H).bfloat16()
    with interpret():
        got = fast.down(h, far, slot_of)
        assert torch.equal(got, fast.down(h, near, torch.zeros(1, 1, dtype=torch.int32)))


def test_errors_name_the_argument() -> None:
    matrix = mxfp4.quantise(torch.randn(2, 64, 32))
    slot_of, x = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, 32).bfloat16()
    with pytest.raises(ValueError, match=r"slot_of is torch\.int64"):
        fast.gate_up(x, matrix, slot_of.long(), 1, *SWIGLU, True)
    with pytest.raises(ValueError, match=r"x is torch\.float32"):
        fast.gate_up(x.float(), matrix, slot_of, 1, *SWIGLU, True)
    with pytest.raises(
        ValueError, match=r"gate_up\.packed is .* expected contiguous torch\.uint8 \[2, 64, 32\]"
    ):
        fast.gate_up(torch.zeros(3, 64).bfloat16(), matrix, slot_of, 1, *SWIGLU, True)
    with pytest.raises(ValueError, match=r"down\.packed is"):
        fast.down(torch.zeros(3, 1, 64).bfloat16(), matrix, slot_of)


# one rank of four, and the whole model on one GPU, whose table passes 2^31 bytes
@pytest.mark.parametrize("F", [768, 3072])
def test_compiles_to_matrix_instructions_at_real_sizes(compile_target, F: int) -> None:
    def matrix(*shape: int) -> Mxfp4:
        *rows, k = shape
        return Mxfp4(meta(*rows, k // 2, dtype=torch.uint8), meta(*rows, k // 32, dtype=torch.uint8))

    ids, slot_of = meta(16, 5, dtype=torch.int32), meta(129, 16, dtype=torch.int32)
    made = compiled_launches(
        compile_target,
        lambda: fast.experts(
            meta(16, 6144), matrix(129, 2 * F, 6144), matrix(129, 6144, F), ids, slot_of,
            meta(16, 5, dtype=torch.float32), *SWIGLU, True,
        ),
    )  # fmt: skip
    assert {name: c.spills for name, c in made.items()} == dict.fromkeys(
        ("_gate_up_kernel", "_down_kernel", "_combine_kernel"), 0
    )
    for name in ("_gate_up_kernel", "_down_kernel"):
        assert made[name].matches(r"mma\S*bf16|v_mfma_f32\S*_bf16|tcgen05\.mma\S*kind::f16")


def test_float64_oracle_of_one_expert() -> None:
    """The reference itself: SwiGLU of the decoded product, rounded where the model says, in float64."""
    x, w = torch.randn(3, 64).bfloat16(), mxfp4.quantise(torch.randn(64, 64) * 0.125)
    v = mxfp4.quantise(torch.randn(96, 32) * 0.2)
    rows = mxfp8.quantise(x).dequantise().double().numpy()
    gate, up = np.split(rows @ w.dequantise().double().numpy().T, 2, axis=1)
    g, u = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    mid = torch.from_numpy(g / (1 + np.exp(-1.702 * g)) * (u + 1)).bfloat16()
    want = mxfp8.quantise(mid).dequantise().double() @ v.dequantise().double().T
    h = swiglu_oai(linear(x, w, activations="mxfp8"), *SWIGLU).bfloat16()
    got = linear(h, v, activations="mxfp8")
    # no value of h lies so near a rounding boundary that fp32 sums would move it
    assert torch.equal(h, mid)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=32 * 2.0**-24 * 200)
