"""Embedding: both arms read the same rows, bit for bit."""

import pytest
import torch
from compile_harness import capture_check
from compiled_launches import meta
from hypothesis import given
from hypothesis import strategies as st
from layer_cases import carry_of, step_of
from strict import ORDERS, on_devices, strict

from mono.deployment import Deployment
from mono.fast import embed as fast
from mono.interface import Arm
from mono.layers.embed import Spec, Weights
from mono.parallel import SOLO
from mono.reference import embed as reference

arm: Arm[Spec, Weights] = fast


@on_devices
@given(st.sampled_from([1, 8, 17, 32]), st.integers(1, 300), st.integers(0, 1), st.sampled_from(ORDERS))
def test_rows_of_the_table(device: str, rows: int, hidden: int, padding: int, order) -> None:
    spec, step = Spec(hidden, 50, 56), step_of(rows, padding)
    weights = Weights(torch.randn(56, hidden).bfloat16())
    carry = carry_of(rows, hidden, partial=False)
    want = reference.build(spec, weights, SOLO)(carry, step, None)
    with strict(device, order):
        got = fast.build(spec, Weights(weights.table.to(device)), SOLO)(carry, step.to(device), None)
    assert torch.equal(got.partial.cpu(), want.partial)
    assert got.residual is carry.residual
    live = step.live
    assert torch.equal(want.partial[live], weights.table[step.tokens[live]])


def test_any_token_of_a_padding_row_reads_inside_the_true_vocabulary() -> None:
    spec = Spec(8, 50, 56)
    table = torch.arange(56)[:, None].expand(56, 8).bfloat16()
    step = step_of(4, padding=3)
    with strict():
        got = fast.build(spec, Weights(table.contiguous()), SOLO)(carry_of(4, 8), step, None)
    assert got.partial[1:, 0].tolist() == [0.0, 49.0, 7.0]


def test_a_table_beyond_two_gigabytes_is_addressed() -> None:
    """Rows 2^26 bytes apart; memory that is never touched is never there."""
    from mono.fast.interpreter import interpret
    from mono.fast.ops.embed import embed

    pool = torch.empty(50 * 2**25, dtype=torch.bfloat16)
    table = pool.as_strided((50, 4), (2**25, 1))
    table[49] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with interpret():
        assert embed(torch.tensor([49]), table, 50).tolist() == [[1.0, 2.0, 3.0, 4.0]]


def test_build_names_what_it_cannot_use() -> None:
    assert fast.refuse(Spec(8, 50, 56), Deployment()) is None
    with pytest.raises(ValueError, match=r"embed\.table: expected \[56, 8\], got \[50, 8\]"):
        fast.build(Spec(8, 50, 56), Weights(torch.zeros(50, 8).bfloat16()), SOLO)


def test_one_launch_that_reads_nothing_on_the_host(compile_target) -> None:
    layer = fast.build(Spec(6144, 200064, 200064), Weights(meta(200064, 6144)), SOLO)
    with capture_check(compile_target) as launches:
        layer(carry_of(16, 6144), step_of(16).to("meta"), None)
    assert launches == [("_embed_kernel", (16, 3))]
