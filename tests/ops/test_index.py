"""The indexer's kernels: block scores near the reference's, block selection exactly the reference's."""

import pytest
import torch
from compiled_launches import compiled_launches, meta
from hypothesis import given
from hypothesis import strategies as st
from paged import ORDERS, launching, lengths, paged, to, with_device

from mono.caches import LayerCache
from mono.fast.ops.index import block_scores, select_blocks
from mono.reference.ops import index as reference
from mono.step import Step

INF, NAN = float("inf"), float("nan")
FEW = [[0.0, -0.0], [1.0, -1.0, 0.0, -0.0, NAN], [INF, -INF, NAN, 3e38, -3e38, 1e-45, -1e-45]]


SELECT = [
    None,
    {"BLOCK_R": 1, "NARROW": 8, "MIDDLE": 16, "num_warps": 4},
    {"BLOCK_R": 4, "NARROW": 16, "MIDDLE": 32, "num_warps": 4},
]

# ---------------------------------------------------------------------- scores


def fast_scores(index_q, cache, step, device, order=None, settings=None) -> torch.Tensor:
    with launching(device, order):
        return block_scores(index_q.to(device), to(cache, device), step.to(device), settings).cpu()


def same_scores(got, want, index_q, cache, step) -> bool:
    """NaN and -inf at the same blocks; elsewhere no further apart than two fp32 sums of I exact products."""
    finite = want.isfinite()
    if not torch.equal(got.isnan(), want.isnan()) or not torch.equal(
        got[~finite & ~want.isnan()], want[~finite & ~want.isnan()]
    ):
        return False
    magnitude = LayerCache(
        cache.k, cache.v, cache.k_scale, cache.v_scale, cache.index_k.float().abs().to(torch.float8_e4m3fn)
    )
    products = reference.block_scores(index_q.abs(), magnitude, step)  # the largest sum |q k| of a block
    bound = 2 * index_q.shape[2] * 2.0**-24 * products
    return bool(((got - want).abs() <= bound)[finite].all())


@st.composite
def score_cases(draw: st.DrawFn):
    q_len, block = draw(st.sampled_from([1, 3, 8])), draw(st.sampled_from([16, 32]))
    heads, width = draw(st.integers(1, 4)), draw(st.sampled_from([16, 64]))
    cache, step = paged(
        draw(lengths(q_len, block)), q_len, draw(st.integers(0, 2**31)), block, heads, 16, width,
        dead=draw(st.sampled_from([NAN, INF, 3e38])),
    )  # fmt: skip
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = draw(st.sampled_from([1.0, 2.0**-22, 2.0**-30]))  # kernels hold queries as fp16 parts
    return (torch.randn(step.rows, heads, width, generator=rng) * size).bfloat16(), cache, step


@with_device
@given(
    case=score_cases(),
    order=st.sampled_from(ORDERS),
    settings=st.sampled_from(
        [None, {"KEYS": 16, "BLOCK_C": 16, "num_warps": 4}, {"KEYS": 64, "BLOCK_C": 64, "num_warps": 4}]
    ),
)
def test_scores_are_the_reference(device, case, order, settings) -> None:
    got = fast_scores(*case, device, order, settings)
    assert same_scores(got, reference.block_scores(*case), *case)


def test_a_nan_among_visible_keys_makes_the_block_nan_and_no_other(device) -> None:
    cache, step = paged([40, 61], q_len=3, block=16)
    index_q = torch.randn(6, 2, 16).bfloat16()
    for request, position in ((0, 17), (1, 60)):  # the last key of request 1 is seen by its last row alone
        page = int(step.block_tables[request, position // 16])
        cache.index_k.view(torch.uint8)[page, position % 16] = 0x7F
    got = fast_scores(index_q, cache, step, device)
    want = reference.block_scores(index_q, cache, step)
    assert same_scores(got, want, index_q, cache, step)
    assert got[:3, :, 1].isnan().all()
    assert got[5, :, 3].isnan().all()
    assert int(got.isnan().sum()) == 2 * (3 + 1)


def test_dead_index_keys_are_never_read(device) -> None:
    """Bit equal whatever lies behind the sequence's end, on its last page and on pages of no one."""
    runs = []
    for dead in (NAN, INF, 0.0):
        cache, step = paged([58, 48, 49], q_len=8, block=16, dead=dead)
        torch.manual_seed(3)
        runs.append(fast_scores(torch.randn(24, 2, 16).bfloat16(), cache, step, device))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@with_device
@given(case=score_cases(), data=st.data())
def test_a_rows_scores_do_not_depend_on_its_neighbours(device, case, data) -> None:
    index_q, cache, step = case
    row = data.draw(st.integers(0, step.rows - 1))
    changed = torch.where(torch.arange(step.rows)[:, None, None] == row, index_q, 7.0 * index_q)
    assert torch.equal(
        fast_scores(index_q, cache, step, device)[row], fast_scores(changed, cache, step, device)[row]
    )


# ---------------------------------------------------------------------- selection


def fast_selection(scores, visible, *sizes, device, order=None, settings=None) -> torch.Tensor:
    with launching(device, order):
        return select_blocks(scores.to(device), visible.to(device), *sizes, settings).cpu()


@st.composite
def selections(draw: st.DrawFn):
    """Scores of few values, so that most of them tie, and rows of every length."""
    T, G, M = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 40))
    block, topk = draw(st.sampled_from([8, 16])), draw(st.integers(1, 17))
    init = draw(st.integers(0, min(2, topk)))
    local = draw(st.integers(0, min(3, topk - init)))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.tensor(draw(st.sampled_from(FEW)))
    if draw(st.booleans()):
        scores = values[torch.randint(len(values), (T, G, M), generator=rng)]
    else:
        scores = torch.randn(T, G, M, generator=rng)
    visible = torch.randint(0, M * block + 1, (T,), generator=rng).int()
    return scores, visible, block, topk, init, local


@with_device
@given(
    case=selections(),
    order=st.sampled_from(ORDERS),
    settings=st.sampled_from(
        [
            None,
            {"BLOCK_R": 1, "NARROW": 8, "MIDDLE": 16, "num_warps": 4},
            {"BLOCK_R": 4, "NARROW": 16, "MIDDLE": 32, "num_warps": 4},
        ]
    ),
)
def test_selection_is_exactly_the_reference(device, case, order, settings) -> None:
    scores, visible, block, *_ = case
    # a block without a visible key has no score that may be read
    dead = torch.arange(scores.shape[2]) >= ((visible + block - 1) // block)[:, None, None]
    scores = torch.where(dead, 9e9, scores)
    got = fast_selection(scores, *case[1:], device=device, order=order, settings=settings)
    assert torch.equal(got, reference.select_blocks(*case))


@pytest.mark.parametrize("width", [1024, 8192])
def test_selection_among_thousands(device, width) -> None:
    scores = torch.randint(-300, 300, (3, 1, width)).float()
    visible = torch.tensor([width * 128, width * 128 - 129, 700 * 128 + 1], dtype=torch.int32)
    got = fast_selection(scores, visible, 128, 16, 0, 1, device=device)
    assert torch.equal(got, reference.select_blocks(scores, visible, 128, 16, 0, 1))


@pytest.mark.parametrize("damaged", [False, True])
def test_known_scores_pick_known_blocks(device, damaged) -> None:
    """One token of each block of 8 has index key (score, 0, ..), the others (score - 5, 0, ..)."""
    score = [3, 4, 6, 7, 1, 6.5, 5, 4.5, 4.8, 0]
    cache, step = paged([80], block=8, heads=1, index_dim=16)
    for block, value in enumerate(score):
        key = torch.zeros(8, 16)
        key[:, 0] = value - 5
        key[block % 8, 0] = value
        if damaged and block < 6:
            key.zero_()
        slot = int(step.block_tables[0, block]) * 8
        cache.insert_index_k(torch.arange(slot, slot + 8), key.bfloat16())
    index_q = torch.zeros(1, 1, 16).bfloat16()
    index_q[..., 0] = 1
    scores = fast_scores(index_q, cache, step, device)
    got = fast_selection(scores, step.visible, 8, 4, 0, 1, device=device)
    assert got.tolist() == [[[6, 7, 8, 9] if damaged else [2, 3, 5, 9]]]


@with_device
@given(case=selections(), data=st.data())
def test_a_rows_selection_does_not_depend_on_its_neighbours(device, case, data) -> None:
    scores, visible, *sizes = case
    row = data.draw(st.integers(0, len(scores) - 1))
    whole = fast_selection(scores, visible, *sizes, device=device)
    alone = fast_selection(scores[row : row + 1], visible[row : row + 1], *sizes, device=device)
    assert torch.equal(whole[row : row + 1], alone)


def test_errors_name_what_was_expected() -> None:
    cache, step = paged([20], heads=2)
    with pytest.raises(ValueError, match="expected contiguous bf16 index_q"):
        block_scores(torch.zeros(1, 2, 16), cache, step)
    without = LayerCache(cache.k, cache.v, cache.k_scale, cache.v_scale)
    with pytest.raises(ValueError, match="no index cache"):
        block_scores(torch.zeros(1, 2, 16).bfloat16(), without, step)
    with pytest.raises(ValueError, match=r"2 \+ 1 forced blocks do not fit into the 2"):
        select_blocks(torch.zeros(1, 1, 4), step.visible, 16, 2, 2, 1)
    with pytest.raises(ValueError, match="expected contiguous fp32 scores"):
        select_blocks(torch.zeros(1, 1, 4).double(), step.visible, 16, 2, 0, 1)


@pytest.mark.parametrize(("heads", "width"), [(1, 128), (1, 8192), (4, 8192)])
def test_compiles_without_spills(compile_target, heads, width) -> None:
    T, D = 8, 128
    fp8 = torch.float8_e4m3fn
    pool = meta(4096, 128, heads, D, dtype=fp8)
    scale = meta(4096, 128, heads, dtype=torch.float32)
    cache = LayerCache(pool, pool, scale, scale, meta(4096, 128, D, dtype=fp8))
    row = meta(T, dtype=torch.int64)
    step = Step(row, row, row, meta(T, dtype=torch.int32), meta(1, width, dtype=torch.int32), T)

    def call() -> None:
        scores = block_scores(meta(T, heads, D), cache, step)
        select_blocks(scores, step.visible, 128, 16, 0, 1)

    made = compiled_launches(compile_target, call)
    assert {name: kernel.spills for name, kernel in made.items()} == {
        "_block_scores_kernel": 0, "_select_blocks_kernel": 0,
    }  # fmt: skip
    instruction = {"sm_90": r"wgmma\S*bf16", "sm_100": r"tcgen05\.mma", "gfx950": r"v_mfma\S*bf16"}
    assert made["_block_scores_kernel"].matches(instruction[compile_target.name])
