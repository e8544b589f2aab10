"""The head: reference against float64, fast arm against reference, ties and padded columns."""

import numpy as np
import pytest
import torch
from compile_harness import capture_check
from compiled_launches import meta
from hypothesis import given
from hypothesis import strategies as st
from layer_cases import EPS, carry_of, norm_weight, step_of, to
from strict import ORDERS, on_devices, strict

from mono.deployment import Deployment
from mono.fast import head as fast
from mono.interface import Arm, Carry
from mono.layers.head import Spec, Weights
from mono.parallel import SOLO
from mono.reference import head as reference

arm: Arm[Spec, Weights] = fast


def case(hidden: int, vocab: int, padded: int) -> tuple[Spec, Weights]:
    head = (torch.randn(padded, hidden) * hidden**-0.5).bfloat16()
    return Spec(hidden, vocab, padded, EPS), Weights(norm_weight(hidden), head)


def exact_logits(carry: Carry, w: Weights) -> np.ndarray:
    total = carry.residual.double().numpy() + carry.partial.double().numpy()
    x = total / np.sqrt((total**2).mean(1, keepdims=True) + EPS) * (1 + w.norm.double().numpy())
    return x @ w.head.double().numpy().T


def test_reference_is_the_formula() -> None:
    spec, w = case(60, 45, 48)
    carry = carry_of(6, 60)
    got = reference.build(spec, w, SOLO)(carry, step_of(6), None)
    want = exact_logits(carry, w)
    # each x is rounded to bf16, half an ulp of at most 2^-8; 60 independent roundings of size |x w|
    np.testing.assert_allclose(got.logits.numpy(), want, rtol=0, atol=0.03)
    assert got.top1.tolist() == [int(row[:45].argmax()) for row in got.logits]
    assert got.partial is None


@on_devices
@given(
    st.sampled_from([1, 8, 17, 32]),
    st.integers(1, 300),
    st.integers(1, 90),
    st.integers(0, 9),
    st.sampled_from(ORDERS),
)
def test_fast_is_the_reference(device: str, rows: int, hidden: int, vocab: int, padding: int, order) -> None:
    spec, w = case(hidden, vocab, vocab + padding)
    w.head[vocab:] = 50.0  # padded columns would win if they could
    carry, step = carry_of(rows, hidden), step_of(rows)
    want = reference.build(spec, w, SOLO)(carry, step, None)
    with strict(device, order):
        layer = fast.build(spec, Weights(w.norm.to(device), w.head.to(device)), SOLO)
        got = layer(to(carry, device), step.to(device), None)
    assert torch.equal(got.residual.cpu(), want.residual)
    assert got.partial is None
    assert got.logits.shape == (rows, vocab + padding)
    # an ulp of bf16 in one x, where the norm's sum in another order crosses a rounding boundary
    total = carry.residual.float() + carry.partial.float()
    size = total.abs().max(1, keepdim=True).values * total.square().mean(1, keepdim=True).rsqrt()
    atol = 2.0**-7 * 1.5 * size * w.head.float().abs().max()
    assert ((got.logits.cpu() - want.logits).abs() <= atol).all()
    assert torch.equal(
        got.logits.cpu()[:, :vocab].max(1).values, got.logits.cpu().gather(1, got.top1.cpu()[:, None])[:, 0]
    )
    margin = want.logits[:, :vocab].topk(min(2, vocab), dim=1).values
    clear = (margin[:, 0] - margin[:, -1] > 2 * atol[:, 0]) | torch.tensor(vocab == 1)
    assert torch.equal(got.top1.cpu()[clear], want.top1[clear])


@on_devices
def test_a_tie_goes_to_the_lower_id(device: str) -> None:
    spec, w = case(40, 30, 32)
    w.head[21] = w.head[7]
    w.head[31] = w.head[7]
    carry = carry_of(8, 40)
    # a residual along that row makes it the winner
    carry = Carry((w.head[7].float() * 40).bfloat16().repeat(8, 1), None)
    with strict(device):
        layer = fast.build(spec, Weights(w.norm.to(device), w.head.to(device)), SOLO)
        got = layer(to(carry, device), step_of(8).to(device), None)
    assert got.top1.tolist() == [7] * 8
    assert torch.equal(got.logits[:, 7], got.logits[:, 21])


@on_devices
def test_a_nan_row_spoils_no_other(device: str) -> None:
    spec, w = case(40, 30, 32)
    carry = carry_of(4, 40)
    with strict(device):
        layer = fast.build(spec, Weights(w.norm.to(device), w.head.to(device)), SOLO)
        want = layer(to(carry, device), step_of(4).to(device), None)
        carry.residual[2, 5] = torch.nan
        got = layer(to(carry, device), step_of(4).to(device), None)
    others = [0, 1, 3]
    assert torch.equal(got.logits[others], want.logits[others])
    assert got.top1[2].item() == 0  # the first NaN
    assert got.logits[2].isnan().all()


def test_refuses_nothing_and_builds_by_name() -> None:
    spec, w = case(40, 30, 32)
    assert fast.refuse(spec, Deployment()) is None
    with pytest.raises(ValueError, match=r"head\.head: expected \[32, 40\], got \[30, 40\]"):
        fast.build(spec, Weights(w.norm, w.head[:30]), SOLO)


def test_four_launches_that_read_nothing_on_the_host(compile_target) -> None:
    layer = fast.build(Spec(6144, 200064, 200064, EPS), Weights(meta(6144), meta(200064, 6144)), SOLO)
    with capture_check(compile_target) as launches:
        layer(to(carry_of(16, 6144), "meta"), step_of(16).to("meta"), None)
    assert [name for name, _ in launches] == [
        "_absorb_norm_kernel", "_bf16_linear_kernel", "_tile_top1_kernel", "_best_tile_kernel",
    ]  # fmt: skip
