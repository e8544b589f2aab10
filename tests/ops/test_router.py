"""The router: reference against float64, fast arm against reference, and what goes wrong in routers."""

import numpy as np
import pytest
import torch
from compiled_launches import compiled_launches, meta
from hypothesis import given
from hypothesis import strategies as st
from strict import ORDERS, on_devices, strict
from torch import Tensor

from mono.fast.ops.router import route
from mono.reference.ops import router as reference

# the sum of a row's products in two orders, sigmoid of a few ulp, and a quotient
CLOSE = {"rtol": 2e-5, "atol": 1e-7}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """x, router, bias, topk and cache slots: any sizes, some rows padding."""
    T, E = draw(st.sampled_from([1, 5, 8, 17, 32])), draw(st.integers(1, 40))
    H, topk = draw(st.integers(1, 200)), draw(st.integers(1, min(E, 8)))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    x = torch.randn(T, H + 3, generator=rng).bfloat16()[:, :H]
    router, bias = torch.randn(E, H, generator=rng) * H**-0.5, torch.rand(E, generator=rng)
    slots = torch.arange(T)
    slots[torch.rand(T, generator=rng) < draw(st.sampled_from([0.0, 0.3]))] = -1
    return x, router, bias, topk, slots


def fast_route(device: str, x, router, bias, topk, scaling, slots, shared) -> tuple[Tensor, Tensor, Tensor]:
    out = route(x.to(device), router.to(device), bias.to(device), topk, scaling, slots.to(device), shared)
    return tuple(y.cpu() for y in out)


def one_hot(logits: Tensor) -> tuple[Tensor, Tensor]:
    """x and a router whose product is exactly `logits` [T, E]."""
    return torch.eye(len(logits)).bfloat16(), logits.T.contiguous()


def exact(x: Tensor, router: Tensor, bias: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Scores and ranked sums in float64."""
    score = 1 / (1 + np.exp(-(x.double().numpy() @ router.double().numpy().T)))
    return score, score + bias.double().numpy()


@given(cases())
def test_reference_is_the_formula(case: tuple[Tensor, Tensor, Tensor, int, Tensor]) -> None:
    x, router, bias, topk, _ = case
    ids, weight = reference.route(x, router, bias, topk, 2.5)
    score, ranked = exact(x, router, bias)
    picked = np.take_along_axis(ranked, ids.numpy(), 1)
    # best first, and none left out that is better, within what fp32 can tell apart
    assert (np.diff(picked, axis=1) <= 1e-5).all()
    assert (picked.min(1) >= -np.sort(-ranked, 1)[:, topk - 1] - 1e-5).all()
    assert all(len(set(row)) == topk for row in ids.tolist())
    chosen = np.take_along_axis(score, ids.numpy(), 1)
    np.testing.assert_allclose(weight.numpy(), chosen / chosen.sum(1, keepdims=True) * 2.5, **CLOSE)


@on_devices
@pytest.mark.parametrize("shared", [False, True])
@given(cases(), st.sampled_from(ORDERS))
def test_fast_is_the_reference(device: str, shared: bool, case, order) -> None:
    x, router, bias, topk, slots = case
    T, E = len(x), len(router)
    with strict(device, order):
        ids, weight, slot_of = fast_route(device, x, router, bias, topk, 2.0, slots, shared)
    want_ids, want_weight = reference.route(x, router, bias, topk, 2.0)
    live = slots >= 0
    # another order of the sum may swap two experts whose ranked sums fp32 can hardly tell apart
    _, ranked = exact(x, router, bias)
    gap = np.abs(np.diff(-np.sort(-ranked, 1), axis=1))[:, :topk].min(1, initial=1.0)
    sure = live & torch.from_numpy(gap > 1e-5)
    assert torch.equal(ids[sure, :topk].long(), want_ids[sure])
    torch.testing.assert_close(weight[sure, :topk], want_weight[sure], **CLOSE)
    if shared:
        assert (ids[live, topk] == E).all()
        assert (weight[live, topk] == 1.0).all()
    # a padding row takes part in nothing
    assert (ids[~live] == -1).all()
    assert not weight[~live].any()
    want_slot = torch.full((E + shared, T), -1)
    for t, row in enumerate(ids.tolist()):
        for slot, e in enumerate(row):
            if e >= 0:
                want_slot[e, t] = slot
    assert torch.equal(slot_of.long(), want_slot)


@on_devices
@pytest.mark.parametrize("gpu_tiles", [False, True])
def test_many_tiles_and_parts_are_one_product(device: str, gpu_tiles: bool) -> None:
    """Several tiles of rows and experts and parts of H, the last cut off, with either device's tiles."""
    x, router, bias = torch.randn(17, 8300).bfloat16(), torch.randn(130, 8300) * 0.01, torch.rand(130)
    with strict(device, gpu_tiles=gpu_tiles):
        ids, weight, _ = fast_route(device, x, router, bias, 4, 2.0, torch.arange(17), False)
    want_ids, want_weight = reference.route(x, router, bias, 4, 2.0)
    ranked = -np.sort(-exact(x, router, bias)[1], 1)
    assert (ranked[:, :4] - ranked[:, 1:5]).min() > 1e-5  # so the order of a sum settles nothing
    assert torch.equal(ids.long(), want_ids)
    torch.testing.assert_close(weight, want_weight, **CLOSE)


@on_devices
def test_a_bias_of_reduced_precision_would_choose_other_experts(device: str) -> None:
    """128 experts whose biases differ by less than bf16 can hold."""
    t, e = torch.arange(256)[:, None].double(), torch.arange(128)[None, :].double()
    logits = (2 * torch.sin(1.3 * t + 0.7 * e + 0.013 * t * e)).float()
    bias = (6.817 + 0.246 * ((37 * torch.arange(128)) % 128) / 127).float()
    x, router = one_hot(logits)
    want, _ = reference.route(x, router, bias, 8, 1.0)
    ranked = -np.sort(-(1 / (1 + np.exp(-logits.double().numpy())) + bias.double().numpy()), 1)
    assert 3e-5 < (ranked[:, 7] - ranked[:, 8]).min() < 4e-5  # fp32 can settle every row
    with strict(device):
        got, _, _ = fast_route(device, x, router, bias, 8, 1.0, torch.arange(256), False)
        rounded, _, _ = fast_route(
            device, x, router, bias.bfloat16().float(), 8, 1.0, torch.arange(256), False
        )
    chosen = got.sort(1).values
    assert torch.equal(chosen.long(), want.sort(1).values)
    assert len(bias.bfloat16().unique()) == 9
    # this input does show the fault: about half of the sets change
    assert (rounded.sort(1).values != chosen).any(1).float().mean().item() == pytest.approx(0.508, abs=1e-3)


@on_devices
def test_scores_and_bias_are_added_in_fp32(device: str) -> None:
    """Scores .500 and .505, biases 7.010 and 7.000: expert 0 wins; a bf16 bias of 7.0 each gives it to 1."""
    x, router = one_hot(torch.tensor([[0.0, float(np.log(0.505 / 0.495))]]))
    bias = torch.tensor([7.010, 7.000])
    with strict(device):
        ids, weight, _ = fast_route(device, x, router, bias, 1, 2.0, torch.tensor([0]), False)
        other, _, _ = fast_route(device, x, router, bias.bfloat16().float(), 1, 2.0, torch.tensor([0]), False)
    assert ids.tolist() == reference.route(x, router, bias, 1, 2.0)[0].tolist() == [[0]]
    assert other.tolist() == [[1]]
    # the bias chooses and never weighs
    assert weight.tolist() == [[2.0]]


@on_devices
def test_equal_scores_go_to_the_lower_id(device: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0] * 5, [-200.0] * 5])
    x, router = one_hot(logits)
    with strict(device):
        ids, weight, _ = fast_route(device, x, router, torch.zeros(5), 3, 1.0, torch.arange(3), False)
    want_ids, want_weight = reference.route(x, router, torch.zeros(5), 3, 1.0)
    assert ids.tolist() == want_ids.tolist() == [[1, 2, 4], [0, 1, 2], [0, 1, 2]]
    # scores of exp(-200) are zero in fp32: the floor makes the weights zero, not NaN
    torch.testing.assert_close(weight, want_weight, **CLOSE)
    assert weight[2].tolist() == [0.0, 0.0, 0.0]


@on_devices
def test_padding_rows_take_part_in_nothing(device: str) -> None:
    """Five real rows padded to eight, the padding keen on experts 6 and 7."""
    logits = torch.empty(8, 8)
    for t in range(5):
        logits[t] = torch.tensor([-0.1 * t - 0.01 * e for e in range(8)])
        logits[t, t % 8], logits[t, (t + 3) % 8] = 4.0, 3.0
    logits[5:] = -1.0
    logits[5:, 6], logits[5:, 7] = 9.0, 8.0
    x, router = one_hot(logits)
    slots = torch.tensor([0, 1, 2, 3, 4, -1, -1, -1])
    quiet = x.clone()
    quiet[5:] = 0.0
    with strict(device):
        ids, weight, slot_of = fast_route(device, x, router, torch.zeros(8), 2, 1.0, slots, False)
        same = fast_route(device, quiet, router, torch.zeros(8), 2, 1.0, slots, False)
    assert ids.tolist() == [[0, 3], [1, 4], [2, 5], [3, 6], [4, 7], [-1, -1], [-1, -1], [-1, -1]]
    assert int((slot_of >= 0).sum()) == 10
    assert (slot_of >= 0).sum(1).tolist() == [1, 1, 1, 2, 2, 1, 1, 1]
    assert all(torch.equal(a, b) for a, b in zip((ids, weight, slot_of), same, strict=True))


@on_devices
def test_a_nan_row_spoils_no_other(device: str) -> None:
    x, router = torch.randn(4, 33).bfloat16(), torch.randn(9, 33)
    args = (router, torch.zeros(9), 2, 1.0, torch.arange(4), True)
    with strict(device):
        want = fast_route(device, x, *args)
        x[1, 4] = torch.nan
        ids, weight, _ = fast_route(device, x, *args)
    others = [0, 2, 3]
    assert torch.equal(ids[others], want[0][others])
    assert torch.equal(weight[others], want[1][others])
    assert ids[1].tolist() == [0, 1, 9]
    assert weight[1, :2].isnan().all()


def test_errors_name_the_argument() -> None:
    x, router, bias = torch.zeros(2, 8).bfloat16(), torch.zeros(4, 8), torch.zeros(4)
    with pytest.raises(ValueError, match=r"router is torch\.bfloat16"):
        route(x, router.bfloat16(), bias, 2, 1.0, torch.arange(2), False)
    with pytest.raises(ValueError, match=r"slots is torch\.int64 \[3\]"):
        route(x, router, bias, 2, 1.0, torch.arange(3), False)
    with pytest.raises(ValueError, match="topk is 5, expected 1 to E = 4"):
        route(x, router, bias, 5, 1.0, torch.arange(2), False)


def test_compiles_at_real_sizes_without_reduced_precision(compile_target) -> None:
    x, router = meta(16, 6144), meta(128, 6144, dtype=torch.float32)
    bias, slots = meta(128, dtype=torch.float32), meta(16, dtype=torch.int64)
    made = compiled_launches(compile_target, lambda: route(x, router, bias, 4, 2.0, slots, True))
    assert {name: c.spills for name, c in made.items()} == {"_router_logits_kernel": 0, "_choose_kernel": 0}
    assert not made["_router_logits_kernel"].matches(r"tf32|xf32|mma\S*bf16")
