"""The embedded checkpoints against the form they were trained in: same roundings, same bytes, same text."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import audit.tiny
from audit.tiny import export, rounding, tokens
from audit.tiny.measure import plain, speculative
from audit.tiny.problems import ordinary_prompts
from audit.tiny.train import SHAPES
from audit.tiny.training_model import (
    Cache,
    Drafter,
    Linear,
    Shape,
    Target,
    rounded_to_storage,
    stored,
    stored_drafter,
)
from mono.checkpoint import load_checkpoint
from mono.formats import kv_fp8, mxfp4, mxfp8, ptpc_fp8

HERE = Path(audit.tiny.__file__).parent
CPU = torch.device("cpu")


@st.composite
def matrices(draw):
    """Rows of very different size, some of zeros, some of exact ties on the e2m1 grid."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    x = torch.randn(7, 96, generator=rng) * torch.exp2(torch.randint(-20, 20, (7, 1), generator=rng).float())
    x[1] = 0
    x[2] = torch.randint(-28, 29, (96,), generator=rng) * 0.25
    return x.bfloat16().float() if draw(st.booleans()) else x


@given(matrices())
def test_fake_quantisation_is_the_stored_bytes_meaning(x):
    assert torch.equal(rounding.mxfp8(x), mxfp8.quantise(x).dequantise())
    assert torch.equal(rounding.mxfp4(x), mxfp4.quantise(x).dequantise())
    codes, scale = rounding.per_row_fp8(x)
    values, scales = ptpc_fp8.quantise_rows(x)
    assert torch.equal(codes, values.float())
    assert torch.equal(scale.squeeze(-1), scales)
    assert torch.equal(rounding.heads_fp8(x), kv_fp8.dequantise(*kv_fp8.quantise_heads(x)))


def small(full_attention_layers: int) -> Shape:
    return Shape(
        full_attention_layers,
        hidden=128,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=32,
        rotary=16,
        dense_layers=2,
        dense_width=128,
        experts=8,
        expert_width=32,
        taps=(0, 2, 3),
        draft_width=64,
        markov_rank=8,
        window=40,
    )


def models(full_attention_layers: int) -> tuple[Target, Drafter]:
    torch.manual_seed(0)
    target, drafter = Target(small(full_attention_layers)), Drafter(small(full_attention_layers))
    with torch.no_grad():
        for value in [*target.parameters(), *drafter.parameters()]:
            value.add_(torch.randn_like(value) * 0.05)
    return target, drafter


def test_steps_with_a_cache_are_the_whole_sequence():
    # full attention alone: a selection may flip on the order of a sum, and then nothing is close
    target = stored(models(4)[0])
    ids = torch.randint(0, 256, (2, 96))
    positions = torch.arange(96).expand(2, -1)
    whole, taps = target.decode(ids, positions, None)
    caches = Cache.empty(target.shape, 2, 112, CPU)
    parts = [
        target.decode(ids[:, a:b], positions[:, a:b], caches)
        for a, b in ((0, 50), (50, 58), (58, 59), (59, 96))
    ]
    # FP8 and MX grids turn a last bit into a step of the grid; a lost or shifted key costs more than a tenth
    for got, want in (
        (torch.cat([p[0] for p in parts], 1), whole),
        (torch.cat([p[1] for p in parts], 1), taps),
    ):
        assert (got - want).float().norm() < 0.03 * want.float().norm()


def test_a_row_sees_no_later_token():
    target = stored(models(0)[0])
    ids = torch.randint(0, 256, (1, 96))
    positions = torch.arange(96)[None]
    before = target.decode(ids, positions, None)[0]
    ids[:, 60:] = 7
    assert torch.equal(before[:, :60], target.decode(ids, positions, None)[0][:, :60])


def test_a_block_of_drafts_sees_the_context_before_its_anchor_alone():
    target, drafter = models(0)
    served, made = stored(target), stored_drafter(drafter)
    ids, positions = torch.randint(0, 256, (1, 96)), torch.arange(96)[None]
    context = made.context(served.decode(ids, positions, None)[1], positions)
    anchors = torch.tensor([[30, 70]])
    rows, _ = made.block(served, ids.gather(1, anchors), anchors, context)
    first = (70 - 40 + 1, 70)  # of the window of the second anchor's first row
    for poisoned, same in (((first[1], 96), True), ((0, first[0]), True), ((69, 70), False)):
        spoilt = [(k.clone(), v.clone()) for k, v in context]
        for k, v in spoilt:
            k[:, slice(*poisoned)], v[:, slice(*poisoned)] = 9.0, 9.0
        again, _ = made.block(served, ids.gather(1, anchors)[:, 1:], anchors[:, 1:], spoilt)
        assert torch.equal(again[0, 0], rows[0, 1]) == same


def test_speculative_text_is_greedy_text():
    target, drafter = models(4)
    prompts = ordinary_prompts(3)
    one = plain(stored(target), prompts, CPU, longest=24)
    many = speculative(stored(target), stored_drafter(drafter), prompts, CPU, longest=24)
    assert many.emitted == sum(many.accepted[a] * (a + 1) for a in many.accepted)
    assert sum(many.accepted.values()) == many.steps
    # eight rows and one row are summed in other orders: a near tie may turn, but not at the first token
    assert [t[0] for t in one.tokens] == [t[0] for t in many.tokens]
    assert sum(a[:24] == b[:24] for a, b in zip(one.tokens, many.tokens, strict=True)) >= 2


def test_an_export_holds_what_was_measured(tmp_path):
    target, drafter = models(2)
    folder = tmp_path / "made"
    export.export(rounded_to_storage(target), rounded_to_storage(drafter), folder)
    checkpoint, served = load_checkpoint(folder), stored(target)
    at = "language_model.model.layers"
    attention = checkpoint.matrix(f"{at}.3.self_attn.index_q_proj").dequantise()
    as_served = served.layers[3].self_attn.index_q_proj
    values, scale = rounding.per_row_fp8(attention)
    assert torch.equal(values, as_served.weight)
    assert torch.equal(scale.squeeze(-1), as_served.scale)
    experts = served.layers[2].mlp
    for expert in range(8):
        for part in ("w1", "w2", "w3"):
            matrix = checkpoint.matrix(f"{at}.2.block_sparse_moe.experts.{expert}.{part}")
            assert torch.equal(matrix.dequantise(), getattr(experts, part)[expert])
    router = checkpoint.tensor(f"{at}.2.block_sparse_moe.gate.weight")
    assert torch.equal(router, target.layers[2].mlp.gate)
    drafts = checkpoint.drafter()
    assert drafts is not None
    down = drafts.matrix("layers.0.decoder_layer.mlp.down_proj").dequantise()
    assert isinstance(stored_drafter(drafter).layers[0].mlp.down_proj, Linear)
    assert torch.equal(down, stored_drafter(drafter).layers[0].mlp.down_proj.weight)


@pytest.mark.parametrize("name", SHAPES)
def test_the_embedded_checkpoint_is_what_the_program_writes(name):
    folder = HERE / name
    assert json.loads((folder / "config.json").read_text()) == export.target_config(SHAPES[name])
    assert json.loads((folder / "dspark" / "config.json").read_text()) == export.drafter_config(SHAPES[name])
    checkpoint = load_checkpoint(folder)
    wanted = export.target_tensors(Target(SHAPES[name]))
    assert set(checkpoint.names) == set(wanted)
    for tensor, value in wanted.items():
        assert checkpoint.entry(tensor).shape == tuple(value.shape), tensor
    assert checkpoint.entry("language_model.lm_head.weight").shape[0] == tokens.ROWS > tokens.TOKENS
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 12_000_000
