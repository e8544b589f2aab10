"""The dense MLP: reference against float64, fast arm against reference."""

import numpy as np
import pytest
import torch
from compile_harness import capture_check
from compiled_launches import compiled_launches, meta
from hypothesis import given
from hypothesis import strategies as st
from layer_cases import EPS, SWIGLU, carry_of, norm_weight, row_errors, step_of, to
from strict import ORDERS, on_devices, strict, ulps

from mono.deployment import Deployment
from mono.fast import dense_mlp as fast
from mono.fast.ops.swiglu import swiglu_ptpc
from mono.formats import PtpcFp8, mxfp8, ptpc_fp8
from mono.interface import Arm
from mono.layers.dense_mlp import Spec, Weights
from mono.parallel import SOLO
from mono.reference import dense_mlp as reference
from mono.reference.numerics import FLOAT64
from mono.reference.ops.swiglu import swiglu_oai

arm: Arm[Spec, Weights] = fast


def case(hidden: int, intermediate: int) -> tuple[Spec, Weights]:
    gate_up = torch.randn(2 * intermediate, hidden) * hidden**-0.5
    down = torch.randn(hidden, intermediate) * intermediate**-0.5
    quantise = ptpc_fp8.quantise_weight
    weights = Weights(norm_weight(hidden), quantise(gate_up), quantise(down))
    return Spec(hidden, intermediate, EPS, **SWIGLU), weights


def on(device: str, w: Weights) -> Weights:
    return Weights(w.norm.to(device), w.gate_up.to(device), w.down.to(device))


def test_reference_is_the_formula() -> None:
    spec, w = case(48, 40)
    carry = carry_of(6, 48)
    got = reference.build(spec, w, SOLO)(carry, step_of(6), None)
    total = (carry.residual.float() + carry.partial.float()).double().numpy()
    x = total / np.sqrt((total**2).mean(1, keepdims=True) + EPS) * (1 + w.norm.double().numpy())

    def product(rows: np.ndarray, matrix: PtpcFp8) -> np.ndarray:
        scale = np.abs(rows).max(1, keepdims=True) / 448
        codes = torch.from_numpy(rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return torch.from_numpy(
            codes.double().numpy() * scale @ matrix.dequantise().double().numpy().T
        ).bfloat16()

    gate, up = product(x, w.gate_up).double().numpy().reshape(6, 2, 40).transpose(1, 0, 2)
    g, u = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    act = torch.from_numpy(g / (1 + np.exp(-1.702 * g)) * (u + 1)).bfloat16().double().numpy()
    want = product(act, w.down)
    # a value of fp32 next to a rounding boundary may fall the other way in float64, one code of e4m3 here and
    # there: 2^-4 of one term of forty
    assert row_errors(got.partial, want).max() < 2e-2
    assert torch.equal(got.residual, torch.from_numpy(total).bfloat16())


@on_devices
@given(
    st.sampled_from([1, 7, 8, 17, 32]),
    st.integers(1, 120),
    st.integers(1, 120),
    st.booleans(),
    st.sampled_from(ORDERS),
)
def test_fast_is_the_reference(
    device: str, rows: int, hidden: int, intermediate: int, partial: bool, order
) -> None:
    spec, w = case(hidden, intermediate)
    carry, step = carry_of(rows, hidden, partial), step_of(rows)
    want = reference.build(spec, w, SOLO)(carry, step, None)
    with strict(device, order):
        got = fast.build(spec, on(device, w), SOLO)(to(carry, device), step.to(device), None)
    assert torch.equal(got.residual.cpu(), want.residual)
    # the arms differ where a sum in another order crosses a rounding boundary; the oracle, which sums in
    # float64, says how much that can cost here
    oracle = reference.build(spec, w, SOLO, FLOAT64)(carry, step, None)
    floor = row_errors(want.partial, oracle.partial)
    assert (row_errors(got.partial, oracle.partial) <= 4 * floor + 2e-2).all()
    # and most often they do not differ at all
    assert (ulps(got.partial, want.partial) == 0).float().mean() > 0.9


@on_devices
@given(st.sampled_from([1, 8, 17]), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_swiglu_quantises_what_the_reference_quantises(device: str, rows: int, width: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    gate_up = (torch.randn(rows, 2 * width + 2, generator=rng) * 6).bfloat16()[:, : 2 * width]
    with strict(device):
        codes, scale = swiglu_ptpc(gate_up.to(device), *SWIGLU.values())
    act = swiglu_oai(gate_up, **SWIGLU).bfloat16()
    want_codes, want_scale = ptpc_fp8.quantise_rows(act)
    # an exponential a few ulp off moves a value over a rounding boundary of bf16 once in thousands
    torch.testing.assert_close(scale.cpu(), want_scale, rtol=2.0**-7, atol=0)
    same = scale.cpu() == want_scale
    off = codes.cpu().float()[same] != want_codes.float()[same]
    assert off.float().mean().nan_to_num() < 5e-3


@on_devices
def test_a_row_does_not_depend_on_its_neighbours(device: str) -> None:
    spec, w = case(70, 90)
    carry, step = carry_of(8, 70), step_of(8).to(device)
    layer = fast.build(spec, on(device, w), SOLO)
    with strict(device):
        want = layer(to(carry, device), step, None)
        carry.residual[:5] = torch.nan
        got = layer(to(carry, device), step, None)
    assert torch.equal(got.partial[5:], want.partial[5:])
    assert got.partial[:5].isnan().all()


def test_refuses_and_builds_by_name() -> None:
    spec, w = case(64, 64)
    assert fast.refuse(spec, Deployment()) is None
    assert fast.refuse(spec, Deployment(linears="checkpoint")) == (
        "linears are 'checkpoint', the kernels read deployment.linears='ptpc_fp8'"
    )
    with pytest.raises(ValueError, match=r"dense_mlp\.down: expected ptpc_fp8, got mxfp8"):
        fast.build(spec, Weights(w.norm, w.gate_up, mxfp8.quantise(torch.randn(64, 64))), SOLO)
    with pytest.raises(ValueError, match=r"dense_mlp\.norm: expected \[64\], got \[32\]"):
        fast.build(spec, Weights(w.norm[:32], w.gate_up, w.down), SOLO)


def meta_layer():
    def matrix(n: int, k: int) -> PtpcFp8:
        return PtpcFp8(meta(n, k, dtype=torch.float8_e4m3fn), meta(n, dtype=torch.float32))

    return fast.build(
        Spec(6144, 12288, EPS, **SWIGLU), Weights(meta(6144), matrix(24576, 6144), matrix(6144, 12288)), SOLO
    )


def test_four_launches_that_read_nothing_on_the_host(compile_target) -> None:
    layer = meta_layer()
    with capture_check(compile_target) as launches:
        layer(to(carry_of(16, 6144), "meta"), step_of(16).to("meta"), None)
    assert [name for name, _ in launches] == [
        "_absorb_norm_kernel", "_ptpc_linear_kernel", "_swiglu_ptpc_kernel", "_ptpc_linear_kernel",
    ]  # fmt: skip


@pytest.mark.parametrize("F", [3072, 12288])  # one rank of four, and the whole
def test_swiglu_compiles_at_real_widths(compile_target, F: int) -> None:
    made = compiled_launches(compile_target, lambda: swiglu_ptpc(meta(16, 2 * F), *SWIGLU.values()))
    assert made["_swiglu_ptpc_kernel"].spills == 0
