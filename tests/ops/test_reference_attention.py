"""Paged attention and block selection of the reference, against float64 written from the definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mono.caches import LayerCache
from mono.reference.ops.attention import attend, attend_selected
from mono.reference.ops.index import block_scores, select_blocks
from mono.step import Step

BLOCK, G, N, D = 8, 2, 6, 16


def filled(lengths: list[int], q: int, seed: int, poison: float = float("nan")) -> tuple[LayerCache, Step]:
    """Caches with random live entries, `poison` everywhere else, and a step whose rows end at `lengths`."""
    rng = torch.Generator().manual_seed(seed)
    per = max(lengths) // BLOCK + 1
    cache = LayerCache.empty(per * len(lengths) + 3, BLOCK, G, D, D)
    if not math.isnan(poison):
        cache.k_scale.fill_(poison)
        cache.v_scale.fill_(poison)
    pages = torch.randperm(cache.k.shape[0], generator=rng)[: per * len(lengths)].view(len(lengths), per)
    for table, length in zip(pages, lengths, strict=True):
        key = torch.arange(length)
        slots = table[key // BLOCK] * BLOCK + key % BLOCK
        cache.insert_kv(
            slots,
            torch.randn(length, G, D, generator=rng).bfloat16() * 3,
            torch.randn(length, G, D, generator=rng).bfloat16() * 0.3,
        )
        cache.insert_index_k(slots, torch.randn(length, D, generator=rng).bfloat16())
    step = Step.of(
        torch.zeros(len(lengths), q, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int32),
        pages.int(),
        BLOCK,
    )
    return cache, step


def exact(q: torch.Tensor, cache: LayerCache, step: Step, chosen: list[list[set[int]]] | None) -> np.ndarray:
    """One row and head at a time, over a list of the keys it may read, in float64."""
    out = np.zeros(tuple(q.shape))
    for t in range(step.rows):
        table = step.block_tables[t // step.q_len].tolist()
        for h in range(N):
            g = h // (N // G)
            keys = [i for i in range(int(step.visible[t])) if chosen is None or i // BLOCK in chosen[t][g]]
            if not keys:
                continue
            page = [(table[i // BLOCK], i % BLOCK) for i in keys]
            k = np.array([cache.k[p, o, g].double().numpy() * float(cache.k_scale[p, o, g]) for p, o in page])
            v = np.array([cache.v[p, o, g].double().numpy() * float(cache.v_scale[p, o, g]) for p, o in page])
            z = k @ q[t, h].double().numpy() / math.sqrt(D)
            p_ = np.exp(z - z.max())
            out[t, h] = p_ @ v / p_.sum()
    return out


@given(
    st.lists(st.integers(3, 40), min_size=1, max_size=3),
    st.sampled_from([1, 3]),
    st.integers(0, 999),
    st.booleans(),
)
def test_attention_is_the_softmax_over_the_keys_a_row_sees(lengths, q, seed, sparse) -> None:
    cache, step = filled(lengths, q, seed)
    rng = torch.Generator().manual_seed(seed)
    query = torch.randn(step.rows, N, D, generator=rng).bfloat16()
    selected = chosen = None
    if sparse:
        selected = select_blocks(
            torch.randn(step.rows, G, step.block_tables.shape[1], generator=rng), step.visible, BLOCK, 2, 0, 1
        )
        chosen = [[set(s) - {-1} for s in row] for row in selected.tolist()]
    out = attend(query, cache, step) if selected is None else attend_selected(query, cache, step, selected)
    got = out.double().numpy()
    want = exact(query, cache, step, chosen)
    # fp32 arithmetic before one rounding to bf16: half a bf16 step, and fp32 noise on values of order 1
    assert (np.abs(got - want) <= np.abs(want) * 2.0**-8 + 1e-5).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_dead_slots_are_never_read(poison: float) -> None:
    query = torch.randn(8, N, D, generator=torch.Generator().manual_seed(3)).bfloat16()
    rows = [attend(query, *filled([58], 8, 5, bad)) for bad in (1.0, poison)]
    assert rows[0].isfinite().all()
    assert torch.equal(*rows)
    last = torch.tensor([-1, 0, 6, 7], dtype=torch.int32).expand(
        8, G, 4
    )  # the tail block, and one that is empty
    rows = [attend_selected(query, *filled([52], 8, 5, bad), last) for bad in (1.0, poison)]
    assert rows[0].isfinite().all()
    assert torch.equal(*rows)


def test_a_row_without_keys_is_zero() -> None:
    cache, step = filled([20], 4, 0)
    padded = step.padded_to(8)
    out = attend(torch.randn(8, N, D).bfloat16(), cache, padded)
    assert (out[4:] == 0).all()
    assert out[:4].abs().sum() > 0


def test_scores_are_the_best_visible_dot_of_each_block() -> None:
    cache, step = filled([37, 18], 3, 1)
    iq = torch.randn(6, G, D).bfloat16()
    got = block_scores(iq, cache, step)
    for t in range(6):
        table = step.block_tables[t // 3].tolist()
        for b in range(step.block_tables.shape[1]):
            keys = [i for i in range(b * BLOCK, (b + 1) * BLOCK) if i < int(step.visible[t])]
            for g in range(G):
                dots = [float(cache.index_k[table[b], i % BLOCK].double() @ iq[t, g].double()) for i in keys]
                want = max(dots, default=-math.inf)
                assert float(got[t, g, b]) == pytest.approx(want, rel=1e-6, abs=1e-6)


def chosen_by_definition(scores: list[float], blocks: int, topk: int, init: int, local: int) -> list[int]:
    """Sort by (forced class, score, id), in plain Python."""

    def rank(b: int) -> tuple[int, float, int]:
        forced = 2 if b >= blocks - local else 1 if b < init else 0
        score = -math.inf if math.isnan(scores[b]) else scores[b]
        return forced, score, b

    return sorted(sorted(range(blocks), key=rank)[-topk:])


@given(st.data())
def test_selection_follows_the_definition(data) -> None:
    M = data.draw(st.integers(1, 12))
    special = st.sampled_from([0.0, -0.0, 1.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e30])
    scores = data.draw(st.lists(special, min_size=M, max_size=M))
    visible = data.draw(st.integers(0, M * BLOCK))
    init, local = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 2))
    topk = data.draw(st.integers(max(init + local, 1), 5))
    got = select_blocks(
        torch.tensor([[scores]]), torch.tensor([visible], dtype=torch.int32), BLOCK, topk, init, local
    )
    blocks = -(-visible // BLOCK)
    want = chosen_by_definition(scores, blocks, topk, init, local)
    assert got.flatten().tolist() == want + [-1] * (topk - len(want))


def test_zeroed_index_keys_change_the_choice() -> None:
    scores = [3, 4, 6, 7, 1, 6.5, 5, 4.5, 4.8]
    cache = LayerCache.empty(10, BLOCK, 1, D, D)
    for b, s in enumerate([*scores, 0]):
        rows = torch.zeros(BLOCK, D)
        rows[:, 0] = s - 5
        rows[2, 0] = s
        cache.insert_index_k(b * BLOCK + torch.arange(BLOCK), rows.bfloat16())
    step = Step.of(
        torch.zeros(1, 1, dtype=torch.int64),
        torch.tensor([80], dtype=torch.int32),
        torch.arange(10, dtype=torch.int32)[None],
        BLOCK,
    )
    query = torch.zeros(1, 1, D).bfloat16()
    query[..., 0] = 1

    def chosen() -> list[int]:
        found = select_blocks(block_scores(query, cache, step), step.visible, BLOCK, 4, 0, 1)
        return found.flatten().tolist()

    assert chosen() == [2, 3, 5, 9]
    cache.insert_index_k(torch.arange(6 * BLOCK), torch.zeros(6 * BLOCK, D).bfloat16())
    assert chosen() == [6, 7, 8, 9]


def test_more_forced_blocks_than_picked_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 \\+ 1 forced blocks do not fit into the 2 picked"):
        select_blocks(torch.zeros(1, 1, 4), torch.tensor([9], dtype=torch.int32), 4, 2, 2, 1)
