"""The full attention layer: the fast arm against the reference, over whole steps."""

from dataclasses import replace

import pytest
import torch
from attention_layers import not_ptpc, random_carry, random_weights, row_errors, run
from compile_harness import capture_check
from hypothesis import given
from hypothesis import strategies as st
from paged import ORDERS, launching, lengths, paged, row_of, with_device

from mono.deployment import Deployment
from mono.fast import dense_attention as fast
from mono.interface import Arm
from mono.layers.dense_attention import TYPE, Spec, Weights
from mono.parallel import SOLO
from mono.reference import dense_attention as reference

SPEC = Spec(hidden=96, heads=6, kv_heads=3, head_dim=32, rotary_dim=16, eps=1e-6, block_size=16)
WEIGHTS = random_weights(TYPE, SPEC)
SERVED = Deployment(max_context=4096)

arm: Arm[Spec, Weights] = fast  # mypy checks that the module fits


def case(lengths, q_len, seed=0):
    cache, step = paged(lengths, q_len, seed, 16, SPEC.kv_heads, SPEC.head_dim, 16)
    return random_carry(SPEC, step.rows, seed), step, replace(cache, index_k=None)


@st.composite
def cases(draw: st.DrawFn):
    q_len = draw(st.sampled_from([1, 3, 8]))
    return case(draw(lengths(q_len, 16, most=8)), q_len, draw(st.integers(0, 2**31)))


@with_device
@given(case=cases(), order=st.sampled_from(ORDERS))
def test_fast_is_the_reference(device, case, order) -> None:
    _, step, cache = case
    want, _ = run(reference, SPEC, WEIGHTS, *case, torch.device("cpu"))
    with launching(device, order):
        got, got_cache = run(fast, SPEC, WEIGHTS, *case, device)
    assert torch.equal(got.residual, want.residual)
    # an e4m3 code of x or of o next to a rounding boundary may step by 2^-4; one in 96 of them moves
    # the row by 2^-4 / sqrt(96) = 2^-7.3, rounding to bf16 by 2^-9
    assert (row_errors(got.partial, want.partial)[step.live] <= 2.0**-6).all()
    unwritten = torch.ones(cache.k.shape[0] * 16, dtype=torch.bool)
    unwritten[step.slots[step.live]] = False
    for name in ("k", "v"):
        before, after = (getattr(c, name).flatten(0, 1).view(torch.uint8) for c in (cache, got_cache))
        assert torch.equal(after[unwritten], before[unwritten])


def test_a_verify_row_is_a_decode_of_its_prefix(device) -> None:
    """Row by row as steps of one token, each on the cache the last one left: the same outputs."""
    carry, step, cache = case([130], 8)
    with launching(device):
        whole, _ = run(fast, SPEC, WEIGHTS, carry, step, cache, device)
        for row in range(8):
            one = replace(carry, residual=carry.residual[row : row + 1], partial=carry.partial[row : row + 1])
            got, cache = run(fast, SPEC, WEIGHTS, one, row_of(step, row), cache, device)
            assert row_errors(got.partial, whole.partial[row : row + 1]).item() <= 2.0**-6


def test_padding_changes_no_bit_of_a_live_row(device) -> None:
    carry, step, cache = case([130], 8)
    padded = random_carry(SPEC, 16, 9)
    for x, live in ((padded.residual, carry.residual), (padded.partial, carry.partial)):
        x[:8] = live
    with launching(device):
        got, _ = run(fast, SPEC, WEIGHTS, carry, step, cache, device)
        out, _ = run(fast, SPEC, WEIGHTS, padded, step.padded_to(16), cache, device)
    assert torch.equal(out.partial[:8], got.partial)
    assert out.partial.isfinite().all()


@pytest.mark.parametrize(
    ("change", "served", "reason"),
    [
        ({}, {}, None),
        ({"heads": 64, "kv_heads": 4, "head_dim": 128, "rotary_dim": 64, "block_size": 128}, {}, None),
        ({"head_dim": 48}, {}, "head_dim is 48"),
        ({"rotary_dim": 40}, {}, "rotary_dim is 40"),
        ({"block_size": 8}, {}, "block_size is 8"),
        ({}, {"kv_format": "bf16"}, "the KV cache is bf16"),
        ({}, {"linears": "checkpoint"}, "linears are 'checkpoint'"),
    ],
)
def test_refusals_name_the_reason(change, served, reason) -> None:
    why = fast.refuse(replace(SPEC, **change), replace(SERVED, **served))
    assert (why is None) if reason is None else (why is not None and reason in why)


def test_build_names_the_matrix_it_cannot_read() -> None:
    for name in ("qkv", "o"):
        wrong = replace(WEIGHTS, **{name: not_ptpc(getattr(WEIGHTS, name))})
        with pytest.raises(ValueError, match=rf"dense_attention\.{name}: expected ptpc_fp8, got bf16"):
            fast.build(SPEC, wrong, SOLO)


def test_a_step_reads_no_device_data_on_the_host(compile_target) -> None:
    """Seven launches of fixed grids, so that a CUDA graph can hold them."""
    carry, step, cache = case([130], 8)
    with capture_check(compile_target) as launches:
        run(fast, SPEC, WEIGHTS, carry, step, cache, torch.device("meta"))
    assert [name for name, _ in launches] == [
        "_absorb_norm_kernel", "_ptpc_linear_kernel", "_norm_rope_insert_kernel", "_attend_kernel",
        "_merge_splits_kernel", "_quantise_rows_kernel", "_ptpc_linear_kernel",
    ]  # fmt: skip
