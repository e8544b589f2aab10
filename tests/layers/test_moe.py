"""Mixture of experts: reference against float64, fast arm against reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from compile_harness import capture_check
from compiled_launches import meta
from hypothesis import given
from hypothesis import strategies as st
from layer_cases import EPS, SWIGLU, carry_of, norm_weight, row_errors, step_of, to
from strict import ORDERS, on_devices, strict, ulps
from torch import Tensor

from mono.deployment import Deployment
from mono.fast import moe as fast
from mono.formats import Mxfp4, mxfp4, mxfp8, nvfp4
from mono.interface import Arm
from mono.layers.moe import Spec, Weights
from mono.parallel import SOLO
from mono.reference import moe as reference
from mono.reference.numerics import FLOAT64

arm: Arm[Spec, Weights] = fast


def case(
    hidden: int = 64,
    intermediate: int = 32,
    experts: int = 6,
    topk: int = 2,
    shared: str = "fused",
    activations: str = "mxfp8",
) -> tuple[Spec, Weights]:
    spec = Spec(
        hidden, intermediate, experts, topk, 2.0, EPS, **SWIGLU, routed_format="mxfp4",
        activations=activations, shared=shared, shared_intermediate=intermediate,
    )  # fmt: skip
    gate_up = torch.randn(spec.table, 2 * intermediate, hidden) * hidden**-0.5
    down = torch.randn(spec.table, hidden, intermediate) * intermediate**-0.5
    router, bias = torch.randn(experts, hidden) * hidden**-0.5, torch.rand(experts)
    return spec, Weights(norm_weight(hidden), router, bias, mxfp4.quantise(gate_up), mxfp4.quantise(down))


def on(device: str, w: Weights) -> Weights:
    return Weights(*(getattr(w, name).to(device) for name in ("norm", "router", "bias", "gate_up", "down")))


@pytest.mark.parametrize("shared", ["fused", "none"])
@pytest.mark.parametrize("activations", ["mxfp8", "bf16"])
def test_reference_is_the_formula(shared: str, activations: str) -> None:
    spec, w = case(shared=shared, activations=activations)
    carry = carry_of(5, 64)
    got = reference.build(spec, w, SOLO, FLOAT64)(carry, step_of(5), None)

    def rounded(x: np.ndarray) -> np.ndarray:
        x = torch.from_numpy(x).bfloat16()
        return (mxfp8.quantise(x).dequantise() if activations == "mxfp8" else x).double().numpy()

    total = (carry.residual.float() + carry.partial.float()).double().numpy()
    x = total / np.sqrt((total**2).mean(1, keepdims=True) + EPS) * (1 + w.norm.double().numpy())
    score = 1 / (1 + np.exp(-(torch.from_numpy(x).bfloat16().double().numpy() @ w.router.double().numpy().T)))
    want = np.zeros((5, 64))
    for t in range(5):
        pick = np.argsort(-(score[t] + w.bias.double().numpy()), kind="stable")[:2]
        weights = [*list(score[t, pick] / score[t, pick].sum() * 2.0), 1.0]
        for e, weight in zip([*pick, 6] if shared == "fused" else pick, weights, strict=False):
            gate, up = np.split(w.gate_up[e].dequantise().double().numpy() @ rounded(x[t]), 2)
            g, u = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
            h = rounded(g / (1 + np.exp(-1.702 * g)) * (u + 1))
            want[t] += weight * (w.down[e].dequantise().double().numpy() @ h)
    # bf16 at the end is 2^-8; an fp32 elementwise value next to a rounding boundary may fall the other way,
    # which is 2^-4 of one of 32 terms under mxfp8
    assert row_errors(got.partial, torch.from_numpy(want)).max() < 2e-2


@st.composite
def shapes(draw: st.DrawFn) -> dict:
    experts = draw(st.integers(1, 19))
    return {
        "hidden": 32 * draw(st.integers(1, 5)),
        "intermediate": 32 * draw(st.integers(1, 4)),
        "experts": experts,
        "topk": draw(st.integers(1, min(4, experts))),
        "shared": draw(st.sampled_from(["fused", "none"])),
        "activations": draw(st.sampled_from(["mxfp8", "bf16"])),
    }


@on_devices
@given(shapes(), st.sampled_from([1, 8, 17, 32]), st.booleans(), st.sampled_from(ORDERS))
def test_fast_is_the_reference(device: str, shape: dict, rows: int, partial: bool, order) -> None:
    spec, w = case(**shape)
    carry, step = carry_of(rows, spec.hidden, partial), step_of(rows, padding=min(3, rows - 1))
    want = reference.build(spec, w, SOLO)(carry, step, None)
    with strict(device, order):
        got = fast.build(spec, on(device, w), SOLO)(to(carry, device), step.to(device), None)
    assert torch.equal(got.residual.cpu(), want.residual)
    assert not got.partial[~step.live.to(device)].any()
    # where a sum in another order crosses a rounding boundary of h, one code of e4m3 differs by 2^-3
    assert row_errors(got.partial, want.partial).max() < 2e-2
    assert (ulps(got.partial, want.partial) == 0).float().mean() > 0.9


@on_devices
@pytest.mark.parametrize("padding_rows", [torch.nan, 1e4])
def test_padding_rows_and_neighbours_change_nothing(device: str, padding_rows: float) -> None:
    spec, w = case(hidden=96, experts=8)
    carry, step = carry_of(8, 96), step_of(8, padding=3).to(device)
    layer = fast.build(spec, on(device, w), SOLO)
    with strict(device):
        want = layer(to(carry, device), step, None)
        carry.residual[5:] = padding_rows
        carry.residual[0] = 5.0
        got = layer(to(carry, device), step, None)
    assert torch.equal(got.partial[1:], want.partial[1:])


def test_the_carry_handed_in_is_left_alone() -> None:
    spec, w = case()
    carry = carry_of(4, 64)
    before = carry.residual.clone(), carry.partial.clone()
    with strict():
        fast.build(spec, w, SOLO)(carry, step_of(4), None)
    assert torch.equal(carry.residual, before[0])
    assert torch.equal(carry.partial, before[1])


def test_refuses_in_words_the_reader_can_act_on() -> None:
    spec, _ = case()
    assert fast.refuse(spec, Deployment()) is None
    assert fast.refuse(replace(spec, routed_format="nvfp4"), Deployment()) == (
        "routed experts are nvfp4, the fused kernel reads mxfp4"
    )
    assert fast.refuse(replace(spec, shared="apart"), Deployment(shared_expert="apart")) == (
        "the shared expert is apart; deployment.shared_expert='fused' makes it one of the table"
    )
    assert fast.refuse(replace(spec, intermediate=96), Deployment(tp_size=2)) == (
        "intermediate is 48 on each rank, the kernel reads whole scale blocks of 32"
    )


def test_build_names_what_it_cannot_use() -> None:
    spec, w = case()
    with pytest.raises(ValueError, match=r"moe\.gate_up: expected mxfp4, got nvfp4"):
        fast.build(spec, replace(w, gate_up=nvfp4.quantise(torch.randn(7, 64, 64), "modelopt")), SOLO)
    with pytest.raises(ValueError, match=r"moe\.router: expected \[6, 64\], got \[5, 64\]"):
        fast.build(spec, replace(w, router=w.router[:5]), SOLO)
    shared = {"shared_gate_up": w.gate_up[0], "shared_down": w.down[0]}
    fewer = replace(w, gate_up=w.gate_up[:6], down=w.down[:6], **shared)
    with pytest.raises(ValueError, match=r"moe\.shared: expected 'fused' or 'none', got 'apart'"):
        fast.build(replace(spec, shared="apart"), fewer, SOLO)


def test_six_launches_that_read_nothing_on_the_host(compile_target) -> None:
    def matrix(*shape: int) -> Mxfp4:
        *rows, k = shape
        return Mxfp4(meta(*rows, k // 2, dtype=torch.uint8), meta(*rows, k // 32, dtype=torch.uint8))

    def fp32(*shape: int) -> Tensor:
        return meta(*shape, dtype=torch.float32)

    spec, _ = case()
    spec = replace(spec, hidden=6144, intermediate=768, experts=128, topk=4)
    weights = Weights(meta(6144), fp32(128, 6144), fp32(128), matrix(129, 1536, 6144), matrix(129, 6144, 768))
    layer = fast.build(spec, weights, SOLO)
    with capture_check(compile_target) as launches:
        layer(to(carry_of(16, 6144), "meta"), step_of(16).to("meta"), None)
    assert [name for name, _ in launches] == [
        "_absorb_norm_kernel", "_router_logits_kernel", "_choose_kernel",
        "_gate_up_kernel", "_down_kernel", "_combine_kernel",
    ]  # fmt: skip
