"""Rows of a step: positions, visible keys, cache slots, padding."""

import pytest
import torch

from mono.step import Step


def step_of(seq_lens: list[int], q: int, block: int = 16, pages: int = 40) -> Step:
    tables = torch.arange(len(seq_lens) * pages, dtype=torch.int32).flip(0).view(len(seq_lens), pages)
    tokens = torch.arange(len(seq_lens) * q).view(len(seq_lens), q)
    return Step.of(tokens, torch.tensor(seq_lens, dtype=torch.int32), tables, block)


def test_rows_see_all_keys_up_to_their_own() -> None:
    step = step_of([300, 129], 3)
    assert step.visible.tolist() == [298, 299, 300, 127, 128, 129]
    assert step.positions.tolist() == [297, 298, 299, 126, 127, 128]


def test_a_verify_step_of_two_requests() -> None:
    step = step_of([260, 37], 8)
    assert step.visible.tolist() == [*range(253, 261), *range(30, 38)]


def test_slots_follow_the_block_table() -> None:
    step = step_of([18], 4)
    table = step.block_tables[0].tolist()
    assert step.slots.tolist() == [table[0] * 16 + 14, table[0] * 16 + 15, table[1] * 16, table[1] * 16 + 1]


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_request_shorter_than_its_rows_is_padding(length: int) -> None:
    step = step_of([length, 9], 8)
    assert step.slots[:8].tolist() == [-1] * 8
    assert step.visible[:8].tolist() == [0] * 8
    assert not step.live[:8].any()
    assert step.live[8:].all()


def test_padding_adds_whole_requests_that_write_nothing() -> None:
    step = step_of([260], 8)
    wide = step.padded_to(16)
    assert (wide.rows, wide.requests) == (16, 2)
    assert wide.slots[8:].tolist() == [-1] * 8
    assert wide.visible[8:].tolist() == [0] * 8
    assert torch.equal(wide.tokens[:8], step.tokens)
    assert step.padded_to(8) is step


@pytest.mark.parametrize("rows", [4, 12])
def test_a_width_that_does_not_fit_is_named(rows: int) -> None:
    with pytest.raises(ValueError, match=f"8 rows of 8 a request to a width of {rows}"):
        step_of([260], 8).padded_to(rows)


def test_a_field_of_the_wrong_type_is_named() -> None:
    step = step_of([260], 8)
    with pytest.raises(
        ValueError, match=r"step\.visible: expected torch\.int32 \[8\], got torch\.int64 \[8\]"
    ):
        Step(step.tokens, step.positions, step.slots, step.visible.long(), step.block_tables, step.q_len)


@pytest.mark.parametrize(
    ("length", "table", "got"),
    [(33, [4, 5], 2), (32, [4, -1], 1), (1, [-7, 5], 0), (32, [], 0)],
)
def test_a_request_without_a_page_for_its_keys_is_named(length: int, table: list[int], got: int) -> None:
    """A position past the table would write over another key, a negative page pass for a padding row."""
    fits = [0] * len(table)
    blocks = -(-length // 16)
    with pytest.raises(
        ValueError, match=f"request 1: expected a page for each of its {blocks} KV blocks, got {got}"
    ):
        Step.of(
            torch.zeros(2, 1, dtype=torch.int64),
            torch.tensor([0, length], dtype=torch.int32),
            torch.tensor([fits, table], dtype=torch.int32),
            16,
        )


def test_entries_past_the_last_block_may_be_anything() -> None:
    tables = torch.tensor([[3, -1], [2**31 - 1, -5]], dtype=torch.int32)
    step = Step.of(torch.zeros(2, 1).long(), torch.tensor([16, 0], dtype=torch.int32), tables, 16)
    assert step.slots.tolist() == [63, -1]


def test_fields_are_contiguous_for_kernels_read_them_so() -> None:
    step = step_of([260], 8)
    strided = torch.zeros(16, dtype=torch.int32)[::2]
    with pytest.raises(ValueError, match=r"step\.visible: expected it contiguous, got strides \(2,\)"):
        Step(step.tokens, step.positions, step.slots, strided, step.block_tables, step.q_len)


@pytest.mark.parametrize(("requests", "rows"), [(0, 1), (1, 0)])
def test_a_step_has_a_row(requests: int, rows: int) -> None:
    with pytest.raises(ValueError, match=f"at least one row, got {requests} requests of {rows}"):
        step_of([5] * requests, rows)
