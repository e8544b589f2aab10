"""The rows of a fixed-width verify step, and the modes that are refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from dspark_toys import drafter_spec

from mono.deployment import Deployment
from mono.dspark import refuse_verify, verify_step

SPEC = drafter_spec()


def test_rows_of_two_requests_of_260_and_37_tokens() -> None:
    tables = torch.arange(40, dtype=torch.int32).view(2, 20)
    anchors, drafts = torch.tensor([7, 8]), torch.arange(14).view(2, 7)
    step = verify_step(anchors, drafts, torch.tensor([252, 29]), tables, 16)
    assert step.q_len == 8
    assert step.visible.tolist() == [*range(253, 261), *range(30, 38)]
    assert step.positions.tolist() == [*range(252, 260), *range(29, 37)]
    assert step.tokens.tolist() == [7, *range(7), 8, *range(7, 14)]
    assert step.slots.tolist() == [*range(252, 260), *range(20 * 16 + 29, 20 * 16 + 37)]
    assert torch.equal(step.block_tables, tables)


def test_no_drafts_is_plain_decode() -> None:
    step = verify_step(
        torch.tensor([7]), torch.zeros(1, 0, dtype=torch.int64), torch.tensor([3]), torch.zeros(1, 1).int(), 4
    )
    assert (step.q_len, step.visible.tolist()) == (1, [4])


@pytest.mark.parametrize("position", [-1, 9])
def test_positions_without_a_page_are_refused(position: int) -> None:
    tables = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"request 1: expected positions from 0 to 15, got {position} to"):
        verify_step(torch.zeros(2).long(), torch.zeros(2, 7).long(), torch.tensor([8, position]), tables, 16)


def test_types_and_shapes_are_named() -> None:
    tables = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="drafts: expected int64"):
        verify_step(torch.tensor([1]), torch.zeros(1, 7).int(), torch.tensor([0]), tables, 16)
    with pytest.raises(ValueError, match=r"anchors: expected \[1\], got \[2\]"):
        verify_step(torch.tensor([1, 2]), torch.zeros(1, 7).long(), torch.tensor([0]), tables, 16)


def test_the_default_deployment_is_not_refused() -> None:
    assert refuse_verify(Deployment(), SPEC) == []
    assert refuse_verify(Deployment(verify="off", draft_len=0), SPEC) == []
    assert refuse_verify(Deployment(), SPEC, synthetic_length=4.0) == []


@pytest.mark.parametrize(
    ("deployment", "spec", "length", "expected"),
    [
        (Deployment(verify="confidence"), SPEC, None, "confidence-scheduled DSpark"),
        (Deployment(verify="ragged"), SPEC, None, "ragged DSpark"),
        (Deployment(draft_len=5), SPEC, None, "draft_len 5 is not the drafter's block of 7"),
        (Deployment(), replace(SPEC, block=5), None, "draft_len 7 is not the drafter's block of 5"),
        (Deployment(widths=(1, 2, 12)), SPEC, None, "no width of .1, 2, 12. holds whole requests of 8 rows"),
        (Deployment(verify="confidence"), SPEC, 4.0, "synthetic acceptance of 4.0 cannot be combined"),
        (Deployment(), SPEC, 9.0, "synthetic acceptance of 9.0 is not within 1 to 8"),
    ],
)
def test_refusals_name_their_reason(
    deployment: Deployment, spec: object, length: float | None, expected: str
) -> None:
    reasons = refuse_verify(deployment, spec, length)  # type: ignore[arg-type]
    assert any(re.search(expected, why) for why in reasons), reasons


def test_all_reasons_are_reported_together() -> None:
    reasons = refuse_verify(Deployment(verify="ragged", draft_len=4, widths=(5,)), SPEC, 3.0)
    assert len(reasons) == 4
