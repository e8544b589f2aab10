"""The whole audit on a random model: another legal order passes, faults fail and are named where they are."""

from dataclasses import replace

import pytest
import random_model as rm
import torch

from audit.arms import Arms, guarded
from audit.plant import KeepingHistory, last_key_masked, tap_early, with_layer
from audit.steps import Prompt
from audit.verdict import Outcome, judge
from audit.whole import Candidate
from mono.assembly import assemble
from mono.formats import Mxfp4
from mono.interface import Carry

MOE, SPARSE, DENSE = 6, 5, 1  # slots: layer 2's MoE, layer 2's attention, layer 0's attention
NAMES = [str(slot) for slot in rm.PLAN.slots]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_another_order_of_sums_passes() -> None:
    evidence = rm.run(rm.candidate(order=5), steps=60, given=rm.prompts(14))
    verdict = judge(evidence, budget=0.05)
    assert verdict.reasons == []
    assert verdict.outcome is Outcome.PASS
    assert {8, 16} == set(evidence.widths)
    # what the limit of 4 rests on: a legal order stays well within it
    assert max(found.ratio for found in verdict.slots + verdict.whole) < 2
    assert max(found.mean_ratio for found in verdict.slots + verdict.whole) < 2


def expert_changed(field: str, change):
    def altered(weights):
        matrix = getattr(weights, field)
        copy = Mxfp4(matrix.packed.clone(), matrix.scale.clone())
        change(copy)
        return replace(weights, **{field: copy})

    return altered


def swap_nibbles(matrix: Mxfp4) -> None:
    matrix.packed[3] = (matrix.packed[3] << 4) | (matrix.packed[3] >> 4)


def swap_experts(matrix: Mxfp4) -> None:
    matrix.packed[[1, 2]], matrix.scale[[1, 2]] = matrix.packed[[2, 1]], matrix.scale[[2, 1]]


def one_scale_byte(matrix: Mxfp4) -> None:
    scale = matrix.scale[3].view(-1)
    scale[int(scale.int().argmax())] += 1


def rope_ahead(weights):
    return replace(weights, rope=torch.cat([weights.rope[1:], weights.rope[-1:]]))


LOCAL_FAULTS = {
    "nibbles of one expert": (MOE, {"change": {MOE: expert_changed("gate_up", swap_nibbles)}}),
    "two experts swapped": (MOE, {"change": {MOE: expert_changed("down", swap_experts)}}),
    "one scale byte": (MOE, {"change": {MOE: expert_changed("down", one_scale_byte)}}),
    "clamp dropped": (MOE, {"specs": {MOE: {"limit": 1e9}}}),
    "clamp of the dense MLP dropped": (2, {"specs": {2: {"limit": 1e9}}}),
    "scaling lost": (MOE, {"specs": {MOE: {"scaling": 1.0}}}),
    "one expert fewer": (MOE, {"specs": {MOE: {"topk": 1}}}),
    "RoPE off by one": (SPARSE, {"change": {SPARSE: rope_ahead}}),
    "RoPE off by one, full attention": (DENSE, {"change": {DENSE: rope_ahead}}),
    "other blocks": (SPARSE, {"specs": {SPARSE: {"init_blocks": 1}}}),
    "a block fewer": (SPARSE, {"specs": {SPARSE: {"topk_blocks": 2}}}),
    "final norm without its 1": (9, {"change": {9: lambda w: replace(w, norm=w.norm - 1)}}),
    "one embedding row": (0, {"change": {0: lambda w: replace(w, table=w.table.roll(1, 0))}}),
}


@pytest.mark.parametrize("name", LOCAL_FAULTS)
def test_a_fault_of_one_slot_is_named_there_and_nowhere_else(name: str) -> None:
    slot, fault = LOCAL_FAULTS[name]
    verdict = judge(rm.run(rm.candidate(**fault), ("local",), steps=20), budget=0.05)
    assert verdict.outcome is Outcome.FAIL
    assert {found.place for found in verdict.slots if found.reasons} == {NAMES[slot]}
    assert verdict.reasons[0].startswith(NAMES[slot])


def test_the_faulty_expert_is_named() -> None:
    arm = rm.candidate(change={MOE: expert_changed("down", one_scale_byte)})
    verdict = judge(rm.run(arm, ("local",), steps=20), budget=0.05)
    (found,) = [found for found in verdict.slots if found.reasons]
    assert (found.output, found.expert) == ("partial", 3)


def test_a_masked_last_key_is_named() -> None:
    fault = last_key_masked(NAMES[SPARSE])
    verdict = judge(rm.run(fault.plant(rm.candidate(), rm.WEIGHTS), ("local",), steps=12), 0.05)
    assert verdict.reasons[0].startswith(fault.place)


def wrapped(index: int, change):
    """A candidate whose slot returns what `change(carry, step, cache, result)` makes of its result."""
    arm = rm.candidate()
    layer = arm.assembly.layers[index]

    def altered(carry, step, cache):
        return change(carry, step, cache, layer(carry, step, cache))

    layers = (*arm.assembly.layers[:index], altered, *arm.assembly.layers[index + 1 :])
    return replace(arm, assembly=replace(arm.assembly, layers=layers))


def poisoned_row(carry, step, cache, after: Carry) -> Carry:
    partial = after.partial.clone()
    partial[5, 3] = float("nan")
    return replace(after, partial=partial)


def zeroed_row(carry, step, cache, after: Carry) -> Carry:
    partial = after.partial.clone()
    partial[5] = 0
    return replace(after, partial=partial)


def in_place(carry, step, cache, after: Carry) -> Carry:
    carry.residual[0, 0] += 1
    return after


def stray_write(carry, step, cache, after: Carry) -> Carry:
    cache.v_scale[step.block_tables[0, 0].long(), 0, 0] = 7.0
    return after


def nothing_written(carry, step, cache, after: Carry) -> Carry:
    cache.v_scale.flatten(0, 1)[step.slots[0]] = float("nan")
    return after


def unsorted(carry, step, cache, after: Carry) -> Carry:
    return replace(after, selected=after.selected.flip(-1))


def higher_id(carry, step, cache, after: Carry) -> Carry:
    return replace(after, top1=(after.top1 + 1) % rm.VOCAB)


@pytest.mark.parametrize(
    ("index", "change", "says"),
    [
        (MOE, poisoned_row, "partial of the fast arm is not finite"),
        (MOE, zeroed_row, "partial: the worst row's error 1"),
        (MOE, in_place, "carry.residual was altered in place"),
        (SPARSE, stray_write, "cache.v_scale was written outside the step's slots"),
        (SPARSE, nothing_written, "v: the worst row's error inf"),
        (SPARSE, unsorted, "chose differently"),
        (9, higher_id, "top-1 is not the largest logit"),
    ],
)
def test_a_misbehaving_slot_is_named(index, change, says) -> None:
    verdict = judge(rm.run(wrapped(index, change), ("local",), steps=6), budget=0.05)
    assert verdict.outcome is Outcome.FAIL
    assert any(why.startswith(NAMES[index]) and says in why for why in verdict.reasons), verdict.reasons


@pytest.mark.parametrize("mode", ["local", "shadow", "forced"])
def test_a_slot_that_raises_fails_and_is_named(mode) -> None:
    arm = rm.candidate()
    index = [str(slot) for slot in rm.PLAN.slots].index("layer 2 (moe)")
    calls = 0

    def breaks(carry, step, cache):
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("out of\nresources " + "x" * 1000)
        return arm.assembly.layers[index](carry, step, cache)

    evidence = rm.run(with_layer(arm, index, breaks), modes=[mode])
    verdict = judge(evidence, 0.2)
    assert verdict.outcome is Outcome.FAIL
    (reason,) = verdict.reasons
    assert reason.startswith("layer 2 (moe): the fast arm raised RuntimeError: out of resources xxx")
    assert reason.endswith(("(a step of 8 rows)", "(a step of 16 rows)"))
    assert len(reason.splitlines()) == 1
    assert len(reason) < 400
    assert evidence.steps < 24


def test_a_reference_that_raises_fails_too(monkeypatch) -> None:
    def broken(carry, step, cache):
        raise ValueError("no room")

    index = len(rm.PLAN.slots) - 1
    of = Arms.of

    def with_broken_reference(*arguments, **named):
        arms = of(*arguments, **named)
        own = with_layer(Candidate(arms.reference), index, broken).assembly
        return replace(arms, reference=guarded(own, "reference"))

    monkeypatch.setattr(Arms, "of", with_broken_reference)
    verdict = judge(rm.run(rm.candidate(), steps=2), 0.2)
    assert verdict.outcome is Outcome.FAIL
    (reason,) = verdict.reasons
    assert reason.startswith("head: the reference arm raised ValueError: no room (a step of ")


def test_nan_on_both_arms_fails() -> None:
    def broken(weights):
        norm = weights.norm.clone()
        norm[3] = float("nan")
        return replace(weights, norm=norm)

    # the same NaN in the weights of every arm: equal bits, and still no pass
    weights = [broken(w) if i == MOE else w for i, w in enumerate(rm.WEIGHTS)]
    built = assemble(rm.PLAN, weights, rm.DEPLOYMENT, "reference")
    arm = replace(rm.candidate(), assembly=replace(built, sides=("fast",) * len(rm.PLAN.slots)))
    subject = replace(rm.SUBJECT, weights=weights)
    verdict = judge(rm.run(arm, ("local",), steps=2, subject=subject), budget=0.05)
    assert verdict.outcome is Outcome.FAIL
    assert any("partial of the reference arm is not finite" in why for why in verdict.reasons)


def test_an_early_tap_is_named() -> None:
    fault = tap_early(2)
    arm = fault.plant(rm.candidate(), rm.WEIGHTS)
    verdict = judge(rm.run(arm, ("shadow", "forced"), steps=12), budget=0.05)
    assert verdict.reasons[0].startswith(fault.place)
    assert any(why.startswith("forced: tap after layer 2") for why in verdict.reasons)


def test_a_kept_key_is_named() -> None:
    arm = replace(rm.candidate(), history=KeepingHistory)
    verdict = judge(rm.run(arm, ("forced",), steps=24), budget=0.05)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.reasons[0].startswith(f"{NAMES[DENSE]}: own cache")


def test_short_contexts_are_no_test_of_selection() -> None:
    short = [Prompt("short", (1, 2, 3)), Prompt("shorter", (1, 2))]
    verdict = judge(rm.run(rm.candidate(), ("local",), steps=2, given=short), budget=0.5)
    assert verdict.outcome is Outcome.FAIL
    assert any("inputs cannot show a selection fault" in why for why in verdict.reasons)


def test_a_slot_of_the_reference_arm_is_said_not_to_be_tested() -> None:
    arm = rm.candidate()
    sides = tuple("reference" if i == 2 else "fast" for i in range(len(NAMES)))
    evidence = rm.run(replace(arm, assembly=replace(arm.assembly, sides=sides)), ("local",), steps=4)
    assert evidence.reference_slots == (NAMES[2],)
    assert NAMES[2] not in evidence.local.places
    assert any("1 slots stay on the reference arm" in line for line in judge(evidence, 0.05).not_tested)
