"""What turns a clean run into a failure, or into nothing said."""

import copy
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import random_model as rm
import torch

from audit.acceptance import compare_acceptance
from audit.evidence import Evidence
from audit.floor import RowAt
from audit.verdict import Outcome, judge
from audit.whole import RowFlip

AT = RowAt("prompt 0", 60, 0, 16)


@pytest.fixture(scope="module")
def _clean() -> Evidence:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    evidence = rm.run(rm.candidate(), steps=24)
    torch.set_num_threads(threads)
    return evidence


@pytest.fixture
def evidence(_clean: Evidence) -> Evidence:
    return copy.deepcopy(_clean)


def reasons(evidence: Evidence, budget: float = 0.2) -> list[str]:
    verdict = judge(evidence, budget)
    assert verdict.outcome is Outcome.FAIL
    return verdict.reasons


def test_the_untouched_run_passes(evidence) -> None:
    assert judge(evidence, 0.2).outcome is Outcome.PASS


def test_too_few_steps_for_the_budget_say_nothing(evidence) -> None:
    verdict = judge(evidence, 0.01)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.needed == 299
    assert "299 clean steps" in verdict.reasons[0]


def test_a_mode_left_out_says_nothing(evidence) -> None:
    evidence.modes = ("local", "shadow")
    verdict = judge(evidence, 0.2)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.reasons == ["mode forced was not run"]


def test_nothing_compared(evidence) -> None:
    evidence.prompts = Counter()
    assert "nothing was compared: no verify step ran" in reasons(evidence)


def test_no_slot_on_the_fast_arm(evidence) -> None:
    evidence.fast_slots = ()
    assert any("no slot runs on the fast arm" in why for why in reasons(evidence))


def test_a_slot_not_visited(evidence) -> None:
    evidence.fast_slots = (*evidence.fast_slots, "layer 9 (moe)")
    assert reasons(evidence) == ["layer 9 (moe): not visited"]


def test_a_width_not_visited(evidence) -> None:
    del evidence.widths[8]
    assert reasons(evidence) == ["width 8: not visited"]


def test_no_context_beyond_a_selection(evidence) -> None:
    evidence.rows_selecting = 0
    assert "inputs cannot show a selection fault" in reasons(evidence)[0]


def test_no_step_after_a_rejection(evidence) -> None:
    evidence.rejected_then = 0
    assert "inputs cannot show a kept key" in reasons(evidence)[0]


def test_no_draft_accepted(evidence) -> None:
    evidence.accepted = Counter({0: 24})
    assert "inputs cannot show a shortened text" in reasons(evidence)[0]


def test_logits_that_are_not_finite(evidence) -> None:
    evidence.shadow.not_finite.append(AT)
    assert reasons(evidence)[0].startswith("shadow: logits are not finite (prompt 0, position 60")


def test_a_blemish_is_said_once(evidence) -> None:
    evidence.blemishes = [("layer 1 (moe)", "partial of the fast arm is not finite", AT)] * 9
    assert len(reasons(evidence)) == 1


def flip(evidence: Evidence, gap: float, step: int = 0, row: int = 0) -> None:
    at, _ = evidence.shadow.steps["fast"][step]
    drafts, own = (1, 1, 1, 1, 1, 1, 1), [2, 0, 0, 0, 0, 0, 0, 0]
    other = list(own)
    other[row] = 3
    acceptance = compare_acceptance(drafts, own, other)
    evidence.shadow.steps["fast"][step] = (at, acceptance)
    where = replace(at, position=at.position + row, row=at.row + row)
    found = RowFlip(where, acceptance.flips[0].place, gap, 2.0**-22)
    evidence.shadow.flips.setdefault("fast", []).append(found)


def test_a_flip_that_noise_does_not_explain_fails(evidence) -> None:
    flip(evidence, gap=1e3)
    verdict = judge(evidence, 0.2)
    assert verdict.outcome is Outcome.FAIL
    assert "at margins that no noise explains" in verdict.reasons[0]
    shadow = verdict.logits[0]
    assert shadow.classes["T3"] == 1
    assert (shadow.divergent.events, shadow.unexplained.events) == (1, 1)


def test_a_near_tie_is_counted_and_passes(evidence) -> None:
    flip(evidence, gap=0.0)
    verdict = judge(evidence, 0.2)
    assert verdict.outcome is Outcome.PASS
    shadow = verdict.logits[0]
    assert shadow.classes["T0"] == 1
    assert shadow.tally.tokens_differ == 1
    assert (shadow.divergent.events, shadow.unexplained.events) == (1, 0)


def test_a_changed_bonus_of_equal_length_is_a_divergence(evidence) -> None:
    flip(evidence, gap=0.0)
    tally = judge(evidence, 0.2).logits[0].tally
    assert (tally.length_differs, tally.tokens_differ) == (0, 1)


def scale_changes(evidence: Evidence, change) -> None:
    floor = [arm for arm in evidence.shadow.change if arm != "fast"]
    rng = np.random.default_rng(0)
    rows = len(evidence.shadow.gaps)
    evidence.shadow.change = {arm: [rng.normal(0, 0.05, rows)] for arm in floor}
    evidence.shadow.change["fast"] = [change(rng.normal(0, 0.05, rows))]


def test_a_change_of_the_margin_beyond_the_floor_fails_without_a_flip(evidence) -> None:
    scale_changes(evidence, lambda noise: 7 * noise)
    assert "the margin changes by" in reasons(evidence)[0]
    scale_changes(evidence, lambda noise: 2 * noise)
    assert judge(evidence, 0.2).outcome is Outcome.PASS


def test_a_bias_of_the_margin_fails_without_a_flip(evidence) -> None:
    scale_changes(evidence, lambda noise: noise + 0.03)
    assert "a bias" in reasons(evidence)[0]


def test_a_margin_that_is_not_a_number_fails(evidence) -> None:
    scale_changes(evidence, lambda noise: np.where(np.arange(len(noise)) == 3, np.nan, noise))
    assert "the margin changes by inf" in reasons(evidence)[0]


def test_drafts_unlike_the_floor_arms_fail(evidence) -> None:
    evidence.drafts.blocks = 60
    evidence.drafts.differ = {"oracle": 1, "reordered/2": 0, "reordered/3": 2, "fast": 20}
    assert reasons(evidence) == [
        "forced: 20 of 60 draft blocks differ from the reference's, against 3 of 180 on the floor arms"
    ]


@pytest.mark.parametrize("budget", [0.0, 1.0, -1.0])
def test_a_budget_is_a_rate(evidence, budget) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        judge(evidence, budget)


def test_the_exit_codes() -> None:
    assert [int(o) for o in (Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE, Outcome.UNUSABLE)] == [
        0,
        1,
        2,
        3,
    ]
