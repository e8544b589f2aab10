"""Which top-1 differences reach the user: the table row by row."""

import pytest

from audit.acceptance import accept, compare_acceptance, tally

DRAFTS = (11, 12, 13, 14, 15, 16, 17)
OTHER = 99


def top1_for(accepted: int, bonus: int = 50) -> list[int]:
    """Reference top-1 ids that accept exactly `accepted` drafts; rows behind are arbitrary."""
    return [*DRAFTS[:accepted], bonus, *range(60, 60 + 7 - accepted)]


@pytest.mark.parametrize("accepted", range(8))
def test_every_accepted_length(accepted) -> None:
    got, emitted = accept(DRAFTS, top1_for(accepted))
    assert got == accepted
    assert emitted == (*DRAFTS[:accepted], 50)


@pytest.mark.parametrize(("accepted", "row"), [(a, i) for a in range(1, 8) for i in range(a)])
def test_a_flip_before_a_shortens(accepted, row) -> None:
    other = top1_for(accepted)
    other[row] = OTHER
    found = compare_acceptance(DRAFTS, top1_for(accepted), other)
    assert found.accepted_other == row
    assert not found.same_length
    assert not found.same_tokens
    assert found.flips[0].place == "before"


@pytest.mark.parametrize("accepted", range(7))
def test_a_flip_at_a_to_the_next_draft_lengthens(accepted) -> None:
    other = top1_for(accepted)
    other[accepted] = DRAFTS[accepted]
    found = compare_acceptance(DRAFTS, top1_for(accepted), other)
    assert found.accepted_other >= accepted + 1
    assert not found.same_tokens
    assert found.flips[0].place == "decisive"


@pytest.mark.parametrize("accepted", range(8))
def test_a_flip_at_a_to_another_token_keeps_the_length_and_changes_the_text(accepted) -> None:
    other = top1_for(accepted)
    other[accepted] = OTHER
    found = compare_acceptance(DRAFTS, top1_for(accepted), other)
    assert found.same_length
    assert not found.same_tokens
    assert found.emitted_other[:-1] == found.emitted[:-1]
    assert found.emitted_other[-1] == OTHER


@pytest.mark.parametrize(("accepted", "row"), [(a, i) for a in range(7) for i in range(a + 1, 8)])
def test_a_flip_after_a_changes_nothing(accepted, row) -> None:
    other = top1_for(accepted)
    other[row] = OTHER
    found = compare_acceptance(DRAFTS, top1_for(accepted), other)
    assert found.same_length
    assert found.same_tokens
    assert not found.same_top1
    assert found.flips[0].place == "after"


def test_levels_are_counted_apart() -> None:
    bonus, late = top1_for(3), top1_for(3)
    bonus[3], late[6] = OTHER, OTHER
    found = tally([compare_acceptance(DRAFTS, top1_for(3), other) for other in (bonus, late, top1_for(3))], 7)
    assert (found.steps, found.rows, found.decisive_rows) == (3, 24, 12)
    assert (found.length_differs, found.tokens_differ, found.top1_differs) == (0, 1, 2)
    assert found.flips == {"before": 0, "decisive": 1, "after": 1}
    assert found.accepted[3] == 3
    assert found.accepted_mean == 3.0


def test_counts_must_fit() -> None:
    with pytest.raises(ValueError, match="one top-1 more than drafts"):
        accept(DRAFTS, [1] * 7)
