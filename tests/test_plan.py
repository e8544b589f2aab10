"""Plans: what is a legal stack, and what its rules say."""

from dataclasses import replace

import pytest

from mono.layers import dense_attention, dense_mlp, embed, head, moe, sparse_attention
from mono.plan import Plan, Slot

EMBED = Slot(-1, "embed", embed.Spec(64, 40, 48))
FULL = dense_attention.Spec(64, 4, 2, 16, 8, 1e-6, 16)
SPARSE = sparse_attention.Spec(64, 4, 2, 16, 8, 1e-6, 16, 16, 4, 0, 1, True)
MLP = dense_mlp.Spec(64, 128, 1e-6, 1.702, 1.0, 7.0)
MOE = moe.Spec(64, 32, 4, 2, 2.0, 1e-6, 1.702, 1.0, 7.0, "mxfp4", "mxfp8", "fused", 32)


def stack(*layers: tuple[object, object]) -> Plan:
    kinds = {FULL.__class__: "dense_attention", SPARSE.__class__: "sparse_attention"}
    kinds |= {MLP.__class__: "dense_mlp", MOE.__class__: "moe"}
    slots = [EMBED]
    for i, pair in enumerate(layers):
        slots += [Slot(i, kinds[spec.__class__], spec) for spec in pair]
    return Plan((*slots, Slot(len(layers), "head", head.Spec(64, 40, 48, 1e-6))))


def test_a_stack_knows_its_prefix_and_who_selects() -> None:
    reuse = replace(SPARSE, selects=False)
    plan = stack((FULL, MLP), (SPARSE, MOE), (reuse, MOE))
    assert (plan.layers, plan.prefix, plan.selecting, plan.keys_before_selection) == (3, 1, (1,), 64)
    assert str(plan.slots[4]) == "layer 1 (moe)"
    assert str(plan.slots[0]) == "embed"


def test_a_stack_without_experts_is_all_prefix() -> None:
    assert stack((FULL, MLP), (FULL, MLP)).prefix == 2
    assert stack((FULL, MLP)).keys_before_selection == 0


def test_two_mlps_in_a_row_are_refused_by_place() -> None:
    with pytest.raises(ValueError, match=r"at layer 0, got layer 0 \(dense_mlp\)"):
        stack((MLP, MLP))


def test_an_unknown_layer_type_is_named() -> None:
    with pytest.raises(ValueError, match="unknown layer type 'mamba'"):
        Slot(0, "mamba", MLP)


def test_a_spec_of_another_type_is_named() -> None:
    with pytest.raises(ValueError, match=r"layer 2 \(moe\): .* got mono\.layers\.dense_mlp"):
        Slot(2, "moe", MLP)


def test_a_missing_head_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected embed, two slots per decoder layer, head"):
        Plan(stack((FULL, MLP)).slots[:-1])
