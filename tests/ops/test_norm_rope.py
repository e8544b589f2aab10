"""Head norm, RoPE and cache insert in one launch, against the reference's three operations."""

import pytest
import torch
from compiled_launches import compiled_launches, meta
from hypothesis import given
from hypothesis import strategies as st
from paged import ORDERS, bf16_ulp, launching, to, with_device

from mono.caches import LayerCache
from mono.fast.ops.norm_rope import norm_rope_insert, pack_norms
from mono.formats import kv_fp8
from mono.reference.ops.attention import norm_rope
from mono.reference.ops.rope import rope_table
from mono.step import Step

EPS = 1e-6
BLOCK = 16
TABLE = rope_table(2048, 32, 1e4)


class Case:
    """A packed row of every head, weights of each kind, an empty cache and a step that writes into it."""

    def __init__(self, T=5, q=1, N=6, G=3, D=64, I=32, rotary=32, selects=True, seed=0, size=1.0) -> None:  # noqa: E741
        rng = torch.Generator().manual_seed(seed)
        self.N, self.G, self.D, self.I, self.selects = N, G, D, I, selects
        self.qkv = (torch.randn(T * q, (N + 2 * G) * D + (G + 1) * I, generator=rng) * size).bfloat16()
        widths = (D, D, I, I) if selects else (D, D)
        self.weights = [torch.randn(w, generator=rng).bfloat16() * 0.3 for w in widths]
        self.rope = TABLE[:, [*range(rotary // 2), *range(16, 16 + rotary // 2)]].contiguous()
        self.cache = LayerCache.empty(2 * T, BLOCK, G, D, I)
        lengths = torch.randint(q, 2 * BLOCK, (T,), generator=rng)
        lengths[torch.rand(T, generator=rng) < 0.2] = 0  # padding requests
        pages = torch.randperm(2 * T, generator=rng).view(T, 2)
        self.step = Step.of(torch.zeros(T, q, dtype=torch.int64), lengths.int(), pages.int(), BLOCK)

    def reference(self):
        T, N, G, D, I = len(self.qkv), self.N, self.G, self.D, self.I  # noqa: E741
        q, k, v, iq, ik = self.qkv.split([N * D, G * D, G * D, G * I, I], dim=1)

        def turned(x, heads, weight):
            return norm_rope(x.view(T, heads, -1), weight, EPS, self.rope, self.step.positions)

        cache = self.cache.clone()
        cache.insert_kv(self.step.slots, turned(k, G, self.weights[1]), v.view(T, G, D))
        q = turned(q, N, self.weights[0])
        if not self.selects:
            return q, None, cache
        cache.insert_index_k(self.step.slots, turned(ik, 1, self.weights[3])[:, 0])
        return q, turned(iq, G, self.weights[2]), cache

    def fast(self, device, order=None, settings=None):
        cache = to(self.cache.clone(), device)
        with launching(device, order):
            q, iq = norm_rope_insert(
                self.qkv.to(device), pack_norms(*self.weights).to(device), self.rope.to(device), EPS,
                self.step.to(device), cache, self.N, self.I if self.selects else None, settings,
            )  # fmt: skip
        return q.cpu(), None if iq is None else iq.cpu(), to(cache, torch.device("cpu"))


cases = st.builds(
    Case,
    T=st.integers(1, 11),
    q=st.sampled_from([1, 3]),
    N=st.sampled_from([3, 6, 9]),
    G=st.just(3),
    D=st.sampled_from([32, 64, 128]),
    I=st.sampled_from([32, 64]),
    rotary=st.sampled_from([2, 10, 32]),
    selects=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1e-4, 1.0, 300.0]),
)
TILES = [None, {"BLOCK_T": 1, "BLOCK_H": 8, "num_warps": 1}, {"BLOCK_T": 4, "BLOCK_H": 2, "num_warps": 4}]


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Within 1 ulp of bf16, or, where the rotation cancels, a few roundings of the pair in fp32."""
    largest = want.double().abs().amax(dim=-1, keepdim=True)
    apart = (got.double() - want.double()).abs()
    return bool((apart <= torch.maximum(bf16_ulp(want), largest * 2.0**-21)).all())


def codes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@with_device
@given(case=cases, order=st.sampled_from(ORDERS), tiles=st.sampled_from(TILES))
def test_fast_is_the_reference(device, case, order, tiles) -> None:
    q, iq, cache = case.reference()
    fast_q, fast_iq, fast_cache = case.fast(device, order, tiles)
    assert near(fast_q, q)
    assert (iq is None) == (fast_iq is None)
    assert iq is None or near(fast_iq, iq)
    # V is not normalised, so its codes and scales are exact
    assert torch.equal(codes(fast_cache.v), codes(cache.v))
    assert torch.equal(fast_cache.v_scale.view(torch.int32), cache.v_scale.view(torch.int32))
    # a slot that no row owns keeps its bytes: NaN in both
    written = torch.zeros(cache.k.shape[0] * BLOCK, dtype=torch.bool)
    written[case.step.slots[case.step.live]] = True
    for name in ("k", "index_k"):
        got, want = (getattr(c, name).flatten(0, 1) for c in (fast_cache, cache))
        assert torch.equal(codes(got)[~written], codes(want)[~written])
        # 1 ulp of bf16 before the quantiser is at most one step of e4m3 after it
        assert ((codes(got)[written].int() - codes(want)[written].int()).abs() <= 1).all()
    assert torch.equal(fast_cache.k_scale.isnan(), cache.k_scale.isnan())
    torch.testing.assert_close(fast_cache.k_scale, cache.k_scale, rtol=2.0**-7, atol=0, equal_nan=True)


@with_device
@given(case=cases)
def test_cached_keys_are_the_rotated_bf16_keys_quantised(device, case) -> None:
    """q heads that hold what the k heads hold show the key that was cached."""
    G, D, I = case.G, case.D, case.I  # noqa: E741
    case.N = G
    case.weights[0] = case.weights[1]
    k = case.qkv[:, : G * D]
    case.qkv = torch.cat([k, k, case.qkv[:, G * D : 2 * G * D], case.qkv[:, -(G + 1) * I :]], dim=1)
    q, _, cache = case.fast(device)
    want, scale = kv_fp8.quantise_heads(q[case.step.live])
    slots = case.step.slots[case.step.live]
    assert torch.equal(codes(cache.k).flatten(0, 1)[slots], codes(want))
    assert torch.equal(cache.k_scale.flatten(0, 1)[slots], scale)


@with_device
@given(case=cases, data=st.data())
def test_a_row_does_not_depend_on_its_neighbours(device, case, data) -> None:
    at = data.draw(st.integers(0, case.step.requests - 1)) * case.step.q_len
    q, iq, _ = case.fast(device)
    case.qkv = torch.where(torch.arange(len(case.qkv))[:, None] == at, case.qkv, float("nan"))
    alone, index_alone, _ = case.fast(device)
    assert torch.equal(q[at], alone[at])
    assert iq is None or torch.equal(iq[at], index_alone[at])


def test_long_positions(device) -> None:
    """No further from float64 than twice the reference; dims past the rotary ones turn by nothing."""
    positions = torch.tensor([257, 4095, 4096, 65535, 65536, 131071, 243000])
    T, D, rotary, base = len(positions), 128, 64, 5e6
    rope = rope_table(243_001, rotary, base)
    rng = torch.Generator().manual_seed(0)
    qkv = torch.randn(T, 3 * D, generator=rng).bfloat16()
    weight = torch.zeros(D, dtype=torch.bfloat16)
    cache = LayerCache.empty(T, BLOCK, 1, D, None)
    step = Step(
        positions, positions, torch.arange(T) * BLOCK, (positions + 1).int(),
        torch.zeros(T, 1, dtype=torch.int32), 1,
    )  # fmt: skip
    with launching(device):
        q, _ = norm_rope_insert(
            qkv.to(device), pack_norms(weight, weight).to(device), rope.to(device), EPS, step.to(device),
            to(cache, device), 1,
        )  # fmt: skip
    want = norm_rope(qkv[:, :D].unsqueeze(1), weight, EPS, rope, positions)

    x = qkv[:, :D].double()
    x = x / (x.square().mean(dim=1, keepdim=True) + EPS).sqrt()
    angle = positions[:, None] * base ** (-torch.arange(32, dtype=torch.float64) / 32)
    a, b = x[:, :32], x[:, 32:64]
    exact = torch.cat(
        [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), x[:, 64:]], dim=1
    )
    error = (q[:, 0].cpu().double() - exact).abs().amax(dim=1)
    reference_error = (want[:, 0].double() - exact).abs().amax(dim=1)
    assert (error <= 2 * reference_error).all()
    assert reference_error.max() < 2.0**-7  # half an ulp of values up to 4
    assert torch.equal(q[:, 0, rotary:].cpu(), want[:, 0, rotary:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_value_spoils_its_vector_and_no_other(device, bad) -> None:
    case = Case(T=3, N=3, seed=5)
    case.step.slots[0] = 0  # live whatever was drawn
    N, G, D = case.N, case.G, case.D
    clean = case.fast(device)[2]
    case.qkv[0, (N + G) * D + 3] = bad  # the first V head of row 0
    spoilt = case.fast(device)[2]
    v = kv_fp8.dequantise(spoilt.v, spoilt.v_scale).flatten(0, 1)
    slot = int(case.step.slots[0])
    assert v[slot, 0].isnan().all()
    assert torch.equal(codes(spoilt.k), codes(clean.k))
    assert torch.equal(codes(spoilt.v).flatten(0, 1)[slot, 1:], codes(clean.v).flatten(0, 1)[slot, 1:])


def test_a_zero_vector_has_scale_one(device) -> None:
    case = Case(T=2, seed=1)
    case.qkv.zero_()
    case.step.slots[:] = torch.tensor([3, 40])
    _, _, cache = case.fast(device)
    for scale in (cache.k_scale, cache.v_scale):
        assert torch.equal(scale.flatten(0, 1)[[3, 40]], torch.ones(2, case.G))


def test_errors_name_what_was_expected() -> None:
    case = Case()
    norms = pack_norms(*case.weights)
    with pytest.raises(ValueError, match="expected qkv bf16"):
        norm_rope_insert(case.qkv.float(), norms, case.rope, EPS, case.step, case.cache, case.N, case.I)
    with pytest.raises(ValueError, match="expected rope fp32"):
        norm_rope_insert(case.qkv, norms, case.rope[:, 1:], EPS, case.step, case.cache, case.N, case.I)
    with pytest.raises(ValueError, match="expected norms"):
        norm_rope_insert(case.qkv, norms[:, :32], case.rope, EPS, case.step, case.cache, case.N, case.I)
    bf16 = LayerCache.empty(4, BLOCK, case.G, case.D, case.I, kv_format="bf16")
    with pytest.raises(ValueError, match=r"cache\.k: expected contiguous"):
        norm_rope_insert(case.qkv, norms, case.rope, EPS, case.step, bf16, case.N, case.I)


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 1), (64, 4)])  # TP4 and TP1
def test_compiles_without_spills(compile_target, heads, kv_heads) -> None:
    T, D = 8, 128
    fp8, int64 = torch.float8_e4m3fn, torch.int64
    cache = LayerCache(
        meta(4096, 128, kv_heads, D, dtype=fp8), meta(4096, 128, kv_heads, D, dtype=fp8),
        meta(4096, 128, kv_heads, dtype=torch.float32), meta(4096, 128, kv_heads, dtype=torch.float32),
        meta(4096, 128, D, dtype=fp8),
    )  # fmt: skip
    step = Step(
        meta(T, dtype=int64), meta(T, dtype=int64), meta(T, dtype=int64), meta(T, dtype=torch.int32),
        meta(1, 8192, dtype=torch.int32), T,
    )  # fmt: skip
    qkv = meta(T, (heads + 2 * kv_heads) * D + (kv_heads + 1) * D)
    made = compiled_launches(
        compile_target,
        lambda: norm_rope_insert(
            qkv, meta(4, D), meta(1 << 20, 64, dtype=torch.float32), EPS, step, cache, heads, D
        ),
    )
    assert {name: kernel.spills for name, kernel in made.items()} == {"_norm_rope_insert_kernel": 0}
