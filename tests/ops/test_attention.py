"""Split attention over the paged cache, dense and block-sparse, against the reference's one softmax."""

import math

import pytest
import torch
from compiled_launches import compiled_launches, meta
from hypothesis import given
from hypothesis import strategies as st
from paged import ORDERS, bf16_ulp, launching, lengths, paged, row_of, to, with_device

from mono.caches import LayerCache
from mono.fast.ops import attention as fast
from mono.reference.ops.attention import attend, attend_selected
from mono.step import Step

INF, NAN = float("inf"), float("nan")
G, D, BLOCK = 2, 16, 16
DENSE = [
    None,
    {"BLOCK_P": 1, "BLOCK_C": 16, "KEYS": 32, "SPLITS": 3, "num_warps": 4},
    {"BLOCK_P": 4, "BLOCK_C": 64, "KEYS": 16, "SPLITS": 1, "num_warps": 4},
]
SPARSE = [
    None,
    {"BLOCK_P": 1, "SPLITS": 16, "num_warps": 4},
    {"BLOCK_P": 4, "SPLITS": 2, "num_warps": 4},
]


def dense(q, cache, step, device, order=None, settings=None) -> torch.Tensor:
    with launching(device, order):
        return fast.attend(q.to(device), to(cache, device), step.to(device), settings).cpu()


def sparse(q, cache, step, selected, device, order=None, settings=None) -> torch.Tensor:
    with launching(device, order):
        return fast.attend_selected(
            q.to(device), to(cache, device), step.to(device), selected.to(device), settings
        ).cpu()


def largest_key(cache: LayerCache) -> float:
    """The largest length of a dequantised key, dead slots aside: theirs is not finite or beyond 1e30."""
    lengths = cache.k.float().norm(dim=-1) * cache.k_scale
    return float(lengths[lengths < 1e30].max()) if (lengths < 1e30).any() else 0.0


def agrees(got, want, q, cache, step, selected=None) -> bool:
    """Within 1 ulp of bf16 and the worst that fp32 can do to the exact sums.

    A z is a sum of D exact products, off by at most D 2^-24 |q| |k| / sqrt(D) in each arm, and p moves
    by that relative amount in the numerator and in the denominator. Sums over at most 2^7 keys add
    2^-17. All of it is relative to sum_t p |v| / sum_t p.
    """
    positive = LayerCache(
        cache.k, cache.v.float().abs().to(torch.float8_e4m3fn), cache.k_scale, cache.v_scale
    )
    if selected is None:
        magnitude = attend(q, positive, step).double()
    else:
        magnitude = attend_selected(q, positive, step, selected).double()
    width = q.shape[2]
    z = q.double().norm(dim=-1, keepdim=True) * largest_key(cache) * width**-0.5
    bound = (2.0**-17 + 4 * width * 2.0**-24 * z) * magnitude
    return bool(((got.double() - want.double()).abs() <= bf16_ulp(want) + bound).all())


@st.composite
def cases(draw: st.DrawFn):
    q_len, block = draw(st.sampled_from([1, 3, 8])), draw(st.sampled_from([16, 32]))
    heads, width, group = draw(st.integers(1, 3)), draw(st.sampled_from([16, 64])), draw(st.integers(1, 5))
    q_size = draw(st.sampled_from([1.0, 2.0**-22]))  # kernels hold queries as fp16 parts
    cache, step = paged(
        draw(lengths(q_len, block)), q_len, draw(st.integers(0, 2**31)), block, heads, width,
        dead=draw(st.sampled_from([NAN, INF, 3e38])), k_size=1 / q_size,
    )  # fmt: skip
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    q = (torch.randn(step.rows, group * heads, width, generator=rng) * q_size).bfloat16()
    return q, cache, step


@st.composite
def sparse_cases(draw: st.DrawFn):
    """And a selection: any blocks of the row, ascending, -1 past the last; perhaps none."""
    q, cache, step = draw(cases())
    S, heads, block = draw(st.sampled_from([1, 3, 4])), cache.k.shape[2], cache.block_size
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    selected = torch.full((step.rows, heads, S), -1, dtype=torch.int32)
    for t, seen in enumerate(step.visible.tolist()):
        blocks = -(-seen // block)
        for g in range(heads):
            count = int(torch.randint(0, min(S, blocks) + 1, (), generator=rng))
            picked = torch.randperm(blocks, generator=rng)[:count].sort().values
            selected[t, g, :count] = picked.int()
    return q, cache, step, selected


@with_device
@given(case=cases(), order=st.sampled_from(ORDERS), settings=st.sampled_from(DENSE))
def test_dense_is_the_reference(device, case, order, settings) -> None:
    got = dense(*case, device, order, settings)
    assert agrees(got, attend(*case), *case)
    assert (got[case[2].visible == 0] == 0).all()


@with_device
@given(case=sparse_cases(), order=st.sampled_from(ORDERS), settings=st.sampled_from(SPARSE))
def test_sparse_is_the_reference(device, case, order, settings) -> None:
    q, cache, _, selected = case
    got = sparse(*case, device, order, settings)
    assert agrees(got, attend_selected(*case), *case)
    nothing = (selected < 0).all(dim=-1).repeat_interleave(q.shape[1] // cache.k.shape[2], dim=1)
    assert (got[nothing] == 0).all()


@with_device
@given(case=sparse_cases(), data=st.data())
def test_a_row_does_not_depend_on_its_neighbours(device, case, data) -> None:
    q, cache, step, selected = case
    row = data.draw(st.integers(0, step.rows - 1))
    mine = torch.arange(step.rows) == row
    other_q = torch.where(mine[:, None, None], q, 3.0)
    other_selected = torch.where(mine[:, None, None], selected, -1)
    # its neighbours see fewer keys, itself as many
    shorter = Step(
        step.tokens, step.positions, step.slots, torch.where(mine, step.visible, step.visible // 2),
        step.block_tables, step.q_len,
    )  # fmt: skip
    for settings in SPARSE[:2]:
        whole = sparse(q, cache, step, selected, device, settings=settings)[row]
        assert torch.equal(
            whole, sparse(other_q, cache, shorter, other_selected, device, settings=settings)[row]
        )
    for settings in DENSE[:2]:
        whole = dense(q, cache, step, device, settings=settings)[row]
        assert torch.equal(whole, dense(other_q, cache, shorter, device, settings=settings)[row])


def all_blocks(step: Step, heads: int, block: int) -> torch.Tensor:
    """The selection that leaves nothing out."""
    ids = torch.arange(step.block_tables.shape[1], dtype=torch.int32)
    seen = (step.visible[:, None] + block - 1) // block
    return torch.where(ids < seen, ids, -1)[:, None].expand(-1, heads, -1).contiguous()


def both(q, cache, step, device, **splits) -> list[torch.Tensor]:
    """Dense attention, and sparse attention over every block."""
    every = all_blocks(step, cache.k.shape[2], cache.block_size)
    return [
        dense(q, cache, step, device, settings={"BLOCK_P": 1, "BLOCK_C": 64, "num_warps": 4, **splits}),
        sparse(q, cache, step, every, device, settings={"BLOCK_P": 8, "SPLITS": 4, "num_warps": 4}),
    ]


@pytest.mark.parametrize("keys", [256, 257, 260, 264, 388, 452])
def test_rows_with_an_empty_split(device, keys) -> None:
    """Splits of 256 keys, 8 queries around an edge: each row is a one-token decode of its prefix."""
    cache, step = paged([keys], q_len=8, block=16, heads=1)
    q = torch.randn(8, 2, 16).bfloat16()
    want = attend(q, cache, step)
    for got in both(q, cache, step, device, KEYS=256, SPLITS=2):
        assert got.isfinite().all()
        assert agrees(got, want, q, cache, step)
    for row in (0, 4, 7):
        alone = row_of(step, row)
        for got in both(q[row : row + 1], cache, alone, device, KEYS=256, SPLITS=2):
            assert agrees(got, want[row : row + 1], q[row : row + 1], cache, alone)


def test_an_empty_split_adds_exactly_nothing(device) -> None:
    cache, step = paged([250], q_len=8, block=16, heads=1)
    q = torch.randn(8, 2, 16).bfloat16()
    runs = [both(q, cache, step, device, KEYS=256, SPLITS=n)[0] for n in (1, 2, 5)]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("keys", [48, 49, 58])
def test_dead_slots_are_never_read(device, keys) -> None:
    """Bit equal whatever the slots and pages behind the sequence's end hold, in K, in V or in both."""
    q = torch.randn(1, 4, 16).bfloat16()
    clean_cache, step = paged([keys], dead=0.0)
    clean = both(q, clean_cache, step, device, KEYS=64, SPLITS=2)
    for dead in (NAN, INF, 3e38):
        dirty = paged([keys], dead=dead)[0]
        for k, v in ((dirty, clean_cache), (clean_cache, dirty), (dirty, dirty)):
            mixed = LayerCache(k.k, v.v, k.k_scale, v.v_scale)
            for got, want in zip(both(q, mixed, step, device, KEYS=64, SPLITS=2), clean, strict=True):
                assert torch.equal(got, want)


def test_scales_are_applied_each_once(device) -> None:
    """40 keys from a formula, stored as k / 0.25 and v / 0.5: a scale left out, or both swapped, shows."""
    T, width = 40, 32
    t, i = torch.arange(T)[:, None], torch.arange(width)[None, :]
    k = torch.round(16 * torch.sin(0.37 * t * (i + 1) + 0.1 * i)) / 8
    v = torch.round(16 * torch.cos(0.23 * t * (i + 1) + 0.2 * i)) / 8
    h = torch.arange(2)[:, None]
    q = (torch.round(16 * torch.sin(0.5 * h + 0.61 * i)) / 8).bfloat16()

    def store(k_scale: float, v_scale: float) -> LayerCache:
        cache = LayerCache.empty(3, 16, 1, width, None)
        for values, x in ((cache.k, k / 0.25), (cache.v, v / 0.5)):
            codes = x.clamp(-448, 448).to(torch.float8_e4m3fn)
            values.view(torch.uint8).flatten(0, 1)[:T, 0] = codes.view(torch.uint8)
        cache.k_scale.flatten(0, 1)[:T] = k_scale
        cache.v_scale.flatten(0, 1)[:T] = v_scale
        return cache

    step = Step(
        torch.zeros(1, dtype=torch.int64), torch.tensor([T - 1]), torch.tensor([T - 1]),
        torch.tensor([T], dtype=torch.int32), torch.tensor([[0, 1, 2]], dtype=torch.int32), 1,
    )  # fmt: skip
    cache = store(0.25, 0.5)
    stored_k, stored_v = (x.flatten(0, 1)[:T, 0].double() for x in (cache.k, cache.v))
    weights = torch.softmax(q.double() @ (stored_k * 0.25).T / math.sqrt(width), dim=1)
    exact = weights @ (stored_v * 0.5)
    for got in both(q[None], cache, step, device, KEYS=64, SPLITS=1):
        assert (got[0].double() - exact).abs().max() <= bf16_ulp(exact).max()
    # the four wrong results, in the size that the formula gives, so the test can tell them apart
    for scales, apart in (((1.0, 1.0), 3.90), ((1.0, 0.5), 1.69), ((0.25, 1.0), 1.00), ((0.5, 0.25), 0.45)):
        for got in both(q[None], store(*scales), step, device, KEYS=64, SPLITS=1):
            error = (got[0].double() - exact).norm() / exact.norm()
            assert error > 0.2, (scales, apart, float(error))


def test_weights_keep_their_bits(device) -> None:
    """Where values cancel, one bf16 weight would leave 2^-12 of the sum; fp32 leaves 2^-18 for 2^6 terms."""
    T, width = 64, 16
    cache, step = paged([T], heads=1, block=16, k_size=0.3)
    rng = torch.Generator().manual_seed(0)
    slots = step.block_tables[0, :4].long()[:, None] * 16 + torch.arange(16)
    sign = torch.tensor([1.0, -1.0]).repeat(T // 2)[:, None, None]
    ones = (sign * torch.ones(T, 1, width)).bfloat16()
    cache.insert_kv(slots.flatten(), (torch.randn(T, 1, width, generator=rng) * 0.3).bfloat16(), ones)
    q = torch.randn(1, 16, width, generator=rng).bfloat16()
    pages = step.block_tables[0, :4].long()
    k = (cache.k[pages].double() * cache.k_scale[pages].double().unsqueeze(-1)).flatten(0, 2)
    p = torch.softmax(q[0].double() @ k.T / 4, dim=1)
    exact = p @ sign[:, 0].double()  # sum_t p |v| is 1
    for got in both(q, cache, step, device, KEYS=64, SPLITS=2):
        error = (got[0].double() - exact).abs()
        assert (error <= bf16_ulp(exact) / 2 + 2.0**-18).all()
        assert float(exact.abs().max()) < 0.25  # so that a bf16 result is finer than what is looked for


@pytest.mark.parametrize("lengths", [(260, 37), (268, 45), (31, 300), (37, 260)])
def test_every_verify_row_is_a_decode_of_its_prefix(device, lengths) -> None:
    cache, step = paged(lengths, q_len=8, block=16)
    assert step.visible.tolist() == [n - back for n in lengths for back in range(7, -1, -1)]
    q = torch.randn(16, 4, 16).bfloat16()
    for got in both(q, cache, step, device, KEYS=128, SPLITS=3):
        for row in (0, 6, 7, 8, 15):
            one, alone = q[row : row + 1], row_of(step, row)
            assert agrees(got[row : row + 1], attend(one, cache, alone), one, cache, alone)


def test_errors_name_what_was_expected() -> None:
    cache, step = paged([20], heads=2)
    q = torch.zeros(1, 4, 16).bfloat16()
    with pytest.raises(ValueError, match="expected contiguous bf16 q"):
        fast.attend(q.float(), cache, step)
    with pytest.raises(ValueError, match="a multiple of 2"):
        fast.attend(q[:, :3].contiguous(), cache, step)
    with pytest.raises(ValueError, match="expected contiguous int32 selected"):
        fast.attend_selected(q, cache, step, torch.zeros(1, 2, 4))


@pytest.mark.parametrize(("heads", "kv_heads", "requests"), [(16, 1, 1), (16, 1, 2), (64, 4, 1)])
def test_compiles_without_spills(compile_target, heads, kv_heads, requests) -> None:
    Q, D = 8, 128
    T = requests * Q
    pool = meta(4096, 128, kv_heads, D, dtype=torch.float8_e4m3fn)
    scale = meta(4096, 128, kv_heads, dtype=torch.float32)
    cache, row = LayerCache(pool, pool, scale, scale), meta(T, dtype=torch.int64)
    step = Step(row, row, row, meta(T, dtype=torch.int32), meta(requests, 8192, dtype=torch.int32), Q)
    q = meta(T, heads, D)
    selected = meta(T, kv_heads, 16, dtype=torch.int32)
    for call in (lambda: fast.attend(q, cache, step), lambda: fast.attend_selected(q, cache, step, selected)):
        made = compiled_launches(compile_target, call)
        assert {name: kernel.spills for name, kernel in made.items()} == dict.fromkeys(made, 0)
        instruction = {"sm_90": r"mma\S*bf16", "sm_100": r"mma", "gfx950": r"v_mfma\S*bf16"}
        attention = next(kernel for name, kernel in made.items() if "attend" in name)
        assert attention.matches(instruction[compile_target.name])
