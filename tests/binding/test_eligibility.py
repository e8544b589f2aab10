"""Every decline of a step, in order, and the width of every step that fits."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from mono.deployment import Deployment
from mono.eligibility import WIDTHS, Fused, Limits, StepMeta, TensorMeta, eligible
from mono.refusal import Declined
from mono.step import Step

I32, I64 = torch.int32, torch.int64
VERIFY = Limits((8, 16), q_len=8, most_blocks=32)


def flat(rows: int, dtype: torch.dtype) -> TensorMeta:
    return TensorMeta(dtype, (rows,), (1,))


def meta(rows: int, q_len: int = 8, blocks: int = 32, **changes: Any) -> StepMeta:
    requests = -(-rows // q_len)
    fits = StepMeta(
        rows=rows,
        q_len=q_len,
        positions=flat(rows, I64),
        slots=flat(rows, I64),
        lengths=flat(requests, I32),
        block_tables=TensorMeta(I32, (requests, blocks), (blocks, 1)),
    )
    return replace(fits, **changes)


DECLINES = [
    (meta(8, prefill=True), "the step has prefill rows"),
    (meta(8, micro_batch=True), "the step is a micro-batch"),
    (meta(8, embeddings=True), "input embeddings are given"),
    (meta(8, intermediates=True), "intermediate tensors are given"),
    (meta(8, capturing=True), "the step is being captured into a graph, and no width is prepared for that"),
    (meta(8, q_len=1), "1 rows a request, bound for 8"),
    (meta(8, q_len=4), "4 rows a request, bound for 8"),
    (meta(0), "0 rows, bound for 1 to 16"),
    (meta(24), "24 rows, bound for 1 to 16"),
    (meta(12), "12 rows are not whole requests of 8"),
    (meta(8, positions=flat(8, I32)), "positions: expected torch.int64, got torch.int32"),
    (meta(8, positions=flat(7, I64)), "positions: expected [8] or more, got [7]"),
    (
        meta(8, positions=TensorMeta(I64, (3, 8), (8, 1))),
        "positions: expected [8] or more, got [3, 8]",
    ),
    (meta(8, slots=flat(8, I32)), "slots: expected torch.int64, got torch.int32"),
    (meta(16, slots=flat(15, I64)), "slots: expected [16] or more, got [15]"),
    (meta(8, lengths=flat(1, I64)), "lengths: expected torch.int32, got torch.int64"),
    (meta(16, lengths=flat(1, I32)), "lengths: expected [2] or more, got [1]"),
    (
        meta(8, block_tables=TensorMeta(I64, (1, 32), (32, 1))),
        "block_tables: expected torch.int32, got torch.int64",
    ),
    (
        meta(16, block_tables=TensorMeta(I32, (1, 32), (32, 1))),
        "block_tables: expected [2, M] or more rows, got [1, 32]",
    ),
    (
        meta(8, block_tables=TensorMeta(I32, (32,), (1,))),
        "block_tables: expected [1, M] or more rows, got [32]",
    ),
    (
        meta(8, block_tables=TensorMeta(I32, (1, 32), (64, 1))),
        "block_tables: expected rows 32 apart, got strides [64, 1]",
    ),
    (
        meta(8, block_tables=TensorMeta(I32, (1, 32), (32, 2))),
        "block_tables: expected rows 32 apart, got strides [32, 2]",
    ),
    (meta(8, blocks=33), "block_tables: 33 KV blocks, bound for 32"),
]


@pytest.mark.parametrize(("step", "reason"), DECLINES, ids=[reason for _, reason in DECLINES])
def test_a_decline_and_its_reason(step: StepMeta, reason: str) -> None:
    decision = eligible(step, VERIFY)
    assert decision == Declined(reason)
    assert not decision


@pytest.mark.parametrize("first", range(len(DECLINES)))
def test_the_first_of_several_reasons_counts(first: int) -> None:
    """Whatever holds at the end of the list does not hide a flag at its beginning."""
    step, reason = DECLINES[first]
    if first < 5:
        later = {"q_len": 4, "rows": 99, "positions": flat(0, I32)}
        assert eligible(replace(step, **later), VERIFY) == Declined(reason)
    else:
        assert eligible(replace(step, prefill=True), VERIFY) == Declined("the step has prefill rows")


def test_no_width_for_whole_requests() -> None:
    assert eligible(meta(8), Limits((12,), q_len=8, most_blocks=32)) == Declined(
        "no width of [12] holds whole requests of 8"
    )


@pytest.mark.parametrize(("rows", "width"), [(8, 8), (16, 16), (24, 32), (32, 32)])
def test_the_smallest_width_that_holds_a_verify_step(rows: int, width: int) -> None:
    decision = eligible(meta(rows), Limits(WIDTHS, q_len=8, most_blocks=32))
    assert decision == Fused(width)
    assert decision


@pytest.mark.parametrize("rows", range(1, 33))
def test_the_smallest_width_that_holds_a_plain_step(rows: int) -> None:
    width = min(w for w in WIDTHS if w >= rows)
    assert eligible(meta(rows, q_len=1), Limits(WIDTHS, q_len=1, most_blocks=32)) == Fused(width)


def test_tensors_longer_than_the_step_fit() -> None:
    """A captured graph's buffers are as long as its widest step."""
    step = meta(8, positions=flat(64, I64), slots=flat(64, I64), lengths=flat(8, I32))
    step = replace(step, block_tables=TensorMeta(I32, (8, 16), (16, 1)))
    assert eligible(step, VERIFY) == Fused(8)


def test_limits_of_a_deployment() -> None:
    assert Limits.of(Deployment(max_context=512), 16) == VERIFY
    plain = Deployment(max_context=2048, verify="off", widths=(1, 8, 16))
    assert Limits.of(plain, 128) == Limits((1, 8, 16), q_len=1, most_blocks=16)


def test_the_facts_of_a_step() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    tables = torch.zeros(2, 32, dtype=torch.int32)
    step = Step.of(tokens, torch.tensor([100, 9], dtype=torch.int32), tables, 16)
    assert eligible(StepMeta.of(step), VERIFY) == Fused(16)


def test_it_reads_no_tensor() -> None:
    """On the meta device there is nothing to read: reading raises."""
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    tables = torch.zeros(2, 32, dtype=torch.int32)
    step = Step.of(tokens, torch.tensor([100, 9], dtype=torch.int32), tables, 16).to("meta")
    assert eligible(StepMeta.of(step), VERIFY) == Fused(16)


def test_it_takes_less_than_20_microseconds() -> None:
    """The promise. It takes about 1 on one core, and the best of many counts: a busy machine only adds."""
    step = meta(16)

    def once() -> float:
        start = time.perf_counter()
        for _ in range(100):
            eligible(step, VERIFY)
        return (time.perf_counter() - start) / 100

    assert min(once() for _ in range(50)) < 20e-6
