"""The block-sparse attention layer: the fast arm against the reference, over whole steps."""

from dataclasses import replace

import pytest
import torch
from attention_layers import moved, not_ptpc, on, random_carry, random_weights, row_errors, run
from compile_harness import capture_check
from hypothesis import given
from hypothesis import strategies as st
from paged import ORDERS, launching, lengths, paged, with_device

from mono.caches import LayerCache
from mono.deployment import Deployment
from mono.fast import sparse_attention as fast
from mono.interface import Arm
from mono.layers.sparse_attention import TYPE, Spec, Weights
from mono.parallel import SOLO
from mono.reference import sparse_attention as reference
from mono.step import Step

SPEC = Spec(
    hidden=96, heads=6, kv_heads=3, head_dim=32, rotary_dim=16, eps=1e-6, block_size=16, index_dim=16,
    topk_blocks=4, init_blocks=0, local_blocks=1, selects=True,
)  # fmt: skip
REAL = {
    "heads": 64, "kv_heads": 4, "head_dim": 128, "rotary_dim": 64, "block_size": 128, "index_dim": 128,
    "topk_blocks": 16,
}  # fmt: skip
WEIGHTS = random_weights(TYPE, SPEC)
SERVED = Deployment(max_context=4096)

arm: Arm[Spec, Weights] = fast  # mypy checks that the module fits


def case(lengths, q_len, seed=0, spec=SPEC):
    cache, step = paged(lengths, q_len, seed, spec.block_size, spec.kv_heads, spec.head_dim, spec.index_dim)
    return random_carry(spec, step.rows, seed), step, cache


def compare(spec, carry, step, cache, device, order=None) -> None:
    want, want_cache = run(reference, spec, WEIGHTS, carry, step, cache, torch.device("cpu"))
    with launching(device, order):
        got, got_cache = run(fast, spec, WEIGHTS, carry, step, cache, device)
    assert torch.equal(got.residual, want.residual)
    assert torch.equal(got.selected, want.selected)
    # an e4m3 code of x or of o next to a rounding boundary may step by 2^-4; one in 96 of them moves
    # the row by 2^-4 / sqrt(96) = 2^-7.3, rounding to bf16 by 2^-9
    assert (row_errors(got.partial, want.partial)[step.live] <= 2.0**-6).all()
    written = torch.zeros(cache.k.shape[0] * spec.block_size, dtype=torch.bool)
    written[step.slots[step.live]] = True
    for name in ("k", "v", "index_k"):
        before, after, wanted = (
            getattr(c, name).flatten(0, 1).view(torch.uint8) for c in (cache, got_cache, want_cache)
        )
        assert torch.equal(after[~written], before[~written])
        if name == "index_k" and not spec.selects:
            assert torch.equal(after, before)
        # all but a few codes are the same, see above
        assert (after[written] != wanted[written]).float().mean() < 0.05


@st.composite
def cases(draw: st.DrawFn):
    q_len = draw(st.sampled_from([1, 3, 8]))
    return case(draw(lengths(q_len, 16, most=8)), q_len, draw(st.integers(0, 2**31)))


@with_device
@given(case=cases(), order=st.sampled_from(ORDERS))
def test_fast_is_the_reference(device, case, order) -> None:
    compare(SPEC, *case, device, order)


def test_a_reusing_layer_takes_the_selection_it_is_handed(device) -> None:
    carry, step, cache = case([130, 64], 8)
    chosen = torch.tensor([0, 2, -1, -1], dtype=torch.int32).expand(16, 3, 4).contiguous()
    reuses = replace(SPEC, selects=False)
    compare(reuses, replace(carry, selected=chosen), step, cache, device)
    with launching(device), pytest.raises(ValueError, match="no layer before it selected"):
        run(fast, reuses, WEIGHTS, carry, step, cache, device)


def test_padding_changes_no_bit_of_a_live_row(device) -> None:
    carry, step, cache = case([130], 8)
    wide = step.padded_to(16)
    padded = random_carry(SPEC, 16, 9)
    for x, live in ((padded.residual, carry.residual), (padded.partial, carry.partial)):
        x[:8] = live
    with launching(device):
        got, got_cache = run(fast, SPEC, WEIGHTS, carry, step, cache, device)
        out, out_cache = run(fast, SPEC, WEIGHTS, padded, wide, cache, device)
    assert torch.equal(out.partial[:8], got.partial)
    assert torch.equal(out.selected[:8], got.selected)
    for name in ("k", "v", "index_k", "k_scale", "v_scale"):
        assert torch.equal(
            getattr(out_cache, name).view(torch.uint8), getattr(got_cache, name).view(torch.uint8)
        )
    assert out.partial.isfinite().all()


@pytest.mark.parametrize(
    ("change", "served", "reason"),
    [
        ({}, {}, None),
        (REAL, {"max_context": 1 << 20}, None),
        ({"head_dim": 48}, {}, "head_dim is 48"),
        ({"rotary_dim": 15}, {}, "rotary_dim is 15"),
        ({"index_dim": 24}, {}, "index_dim is 24"),
        ({"rotary_dim": 32}, {}, "no less than rotary_dim 32"),
        ({"block_size": 24}, {}, "block_size is 24"),
        ({"heads": 300}, {}, "100 query heads share a KV head"),
        ({"topk_blocks": 65}, {}, "topk_blocks is 65"),
        ({"init_blocks": 4}, {}, "4 . 1 forced blocks do not fit"),
        ({}, {"kv_format": "bf16"}, "the KV cache is bf16"),
        ({}, {"linears": "checkpoint"}, "linears are 'checkpoint'"),
        ({}, {"max_context": 1 << 21}, "max_context is 2097152"),
    ],
)  # fmt: skip
def test_refusals_name_the_reason(change, served, reason) -> None:
    why = fast.refuse(replace(SPEC, **change), replace(SERVED, **served))
    assert (why is None) if reason is None else (why is not None and reason.replace(" . ", " + ") in why)


def test_build_names_the_matrix_it_cannot_read() -> None:
    for name in ("qkv", "o"):
        wrong = replace(WEIGHTS, **{name: not_ptpc(getattr(WEIGHTS, name))})
        with pytest.raises(ValueError, match=rf"sparse_attention\.{name}: expected ptpc_fp8, got bf16"):
            fast.build(SPEC, wrong, SOLO)
    with pytest.raises(ValueError, match=r"sparse_attention\.q_norm: expected \[32\], got \[16\]"):
        fast.build(SPEC, replace(WEIGHTS, q_norm=WEIGHTS.q_norm[:16]), SOLO)


def test_a_step_reads_no_device_data_on_the_host(compile_target) -> None:
    """Nine launches of fixed grids, so that a CUDA graph can hold them."""
    cache, step = paged([130], 8, 0, 16, SPEC.kv_heads, SPEC.head_dim, SPEC.index_dim)
    with capture_check(compile_target) as launches:
        run(fast, SPEC, WEIGHTS, random_carry(SPEC, 8), step, cache, torch.device("meta"))
    assert [name for name, _ in launches] == [
        "_absorb_norm_kernel", "_ptpc_linear_kernel", "_norm_rope_insert_kernel", "_block_scores_kernel",
        "_select_blocks_kernel", "_attend_selected_kernel", "_merge_splits_kernel", "_quantise_rows_kernel",
        "_ptpc_linear_kernel",
    ]  # fmt: skip


@pytest.mark.gpu
def test_a_replayed_graph_is_the_eager_step_bit_by_bit() -> None:
    """Captured at one set of lengths, replayed at others, with the requests swapped too."""

    device = torch.device("cuda")
    layer = fast.build(SPEC, moved(WEIGHTS, device), SOLO)
    cache = LayerCache.empty(64, 16, 3, 32, 16)
    full, _ = paged([1008], 8, 0, 16, 3, 32, 16, spare=0)
    for name in ("k", "v", "k_scale", "v_scale", "index_k"):
        getattr(cache, name).view(torch.uint8).copy_(getattr(full, name).view(torch.uint8)[:64])
    pages = torch.randperm(63).int()[:60].view(2, 30)

    def step_of(lengths) -> Step:
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        return Step.of(tokens, torch.tensor(lengths, dtype=torch.int32), pages, 16).to(device)

    static, on_gpu = step_of([260, 37]), LayerCache(*(x.to(device) for x in cache._tensors()))
    carry = on(random_carry(SPEC, 16), device)
    layer(carry, static, on_gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(carry, static, on_gpu)
    for lengths_now in ([268, 45], [31, 300], [37, 260]):
        now = step_of(lengths_now)
        for name in ("positions", "slots", "visible"):
            getattr(static, name).copy_(getattr(now, name))
        graph.replay()
        replayed = (out.partial.clone(), out.selected.clone())
        eager = layer(carry, now, on_gpu)
        assert torch.equal(replayed[0], eager.partial)
        assert torch.equal(replayed[1], eager.selected)
