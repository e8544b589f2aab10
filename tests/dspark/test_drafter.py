"""The drafter against the same maths in float64, and what its drafts may and may not depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from dspark_toys import (
    EPS,
    HEADS,
    KV_HEADS,
    PADDED,
    POSITIONS,
    THETA,
    VOCAB,
    D,
    drafter_spec,
    drafter_weights,
)
from dspark_toys import tiny_drafter as tiny
from torch import Tensor

from mono.dspark import Drafter, DrafterSpec, DrafterWeights, load_drafter
from mono.formats import Matrix
from mono.reference.numerics import FLOAT64, NATIVE, reordered

H, ROTARY = 64, 8


def tap_rows(count: int, seed: int = 3) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3 * H, generator=rng).bfloat16()


def draft(drafter: Drafter, taps: Tensor, anchor: int, P: int, chunks: tuple[int, ...] = ()) -> Any:
    """A proposal after `taps` were written, cut at `chunks`."""
    context = drafter.new_context(POSITIONS)
    cuts = [0, *chunks, len(taps)]
    for start, stop in pairwise(cuts):
        drafter.write_context(context, taps[start:stop], start)
    return drafter.propose([context], torch.tensor([anchor]), torch.tensor([P]), keep_logits=True)


# The maths once more, in float64 without rounding, one loop per sum; `change` breaks one rule for a control


def exact_logits(
    drafter: Drafter, taps: Tensor, anchor: int, P: int, drafts: list[int], change: str = ""
) -> Tensor:
    s, w = drafter.spec, drafter.weights

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        one = 0.0 if change == "norm without the 1" else 1.0
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (one + weight.double())

    def turn(x: Tensor, position: int) -> Tensor:
        out = x.clone()
        for i in range(ROTARY // 2):
            angle = torch.tensor(position * THETA ** (-2 * i / ROTARY), dtype=torch.float64)
            a, b = x[:, i], x[:, i + ROTARY // 2]
            out[:, i], out[:, i + ROTARY // 2] = (
                a * angle.cos() - b * angle.sin(),
                b * angle.cos() + a * angle.sin(),
            )
        return out

    def heads(x: Tensor, matrix: Matrix, norm: Tensor | None, position: int) -> Tensor:
        y = (matrix.dequantise().double() @ x).view(-1, D)
        return y if norm is None else turn(rms(y, norm), position)

    late = 1 if change == "block one position early" else 0
    rows = [P + i - late for i in range(s.block)]
    x = [w.embed[anchor if i == 0 else s.noise_token].double() for i in range(s.block)]
    context = [rms(w.fc.double() @ t.double(), w.context_norm) for t in taps[:P]]
    for layer in w.layers:
        keys = [
            (at, heads(c, layer.k, layer.k_norm, at), heads(c, layer.v, None, at))
            for at, c in enumerate(context)
        ]
        normed = [rms(r, layer.input_norm) for r in x]
        keys += [
            (at, heads(n, layer.k, layer.k_norm, at), heads(n, layer.v, None, at))
            for at, n in zip(rows, normed, strict=True)
        ]
        new = []
        for at, row, n in zip(rows, x, normed, strict=True):
            q = heads(n, layer.q, layer.q_norm, at)
            seen = [
                (k, v)
                for p, k, v in keys
                if (s.window is None or change == "no window" or p >= at - (s.window - 1))
                and not (change == "causal block" and p > at)
            ]
            out = []
            for head in range(HEADS):
                g = head // (HEADS // KV_HEADS)
                z = torch.stack([q[head] @ k[g] for k, _ in seen]) * D**-0.5
                out.append((z.softmax(0)[:, None] * torch.stack([v[g] for _, v in seen])).sum(0))
            row = row + layer.o.dequantise().double() @ torch.cat(out)
            m = rms(row, layer.post_norm)
            gate, up = layer.gate.dequantise().double() @ m, layer.up.dequantise().double() @ m
            gate, up = gate.clamp(max=s.limit), up.clamp(-s.limit, s.limit)
            new.append(
                row
                + layer.down.dequantise().double() @ (gate * torch.sigmoid(s.alpha * gate) * (up + s.beta))
            )
        x = new
    logits = []
    for row, previous in zip(x, [anchor, *drafts], strict=False):
        z = w.head[:VOCAB].double() @ rms(row, w.final_norm)
        if change != "no Markov term":
            z = z + w.markov_w2[:VOCAB].double() @ w.markov_w1[previous].double()
        logits.append(z)
    return torch.stack(logits)


# bf16 rounds to 2^-9; some 30 roundings lie between a tap and a logit: 2^-9 sqrt(30) = 1.1 % in quadrature
BOUND = 0.02


@pytest.mark.parametrize("P", [0, 1, 20, 45])
def test_logits_are_those_of_the_maths(P: int) -> None:
    drafter, taps = tiny(), tap_rows(P)
    got = draft(drafter, taps, 11, P)
    exact = exact_logits(drafter, taps, 11, P, got.drafts[0].tolist())
    error = (got.logits[0].double() - exact).norm(dim=1) / exact.norm(dim=1)  # worst row, not the mean
    assert error.max() < BOUND


@pytest.mark.parametrize(
    "change",
    ["norm without the 1", "block one position early", "no window", "causal block", "no Markov term"],
)
def test_the_comparison_sees_each_rule_broken(change: str) -> None:
    drafter, taps = tiny(window=12), tap_rows(45)
    got = draft(drafter, taps, 11, 45)
    exact = exact_logits(drafter, taps, 11, 45, got.drafts[0].tolist(), change)
    assert ((got.logits[0].double() - exact).norm(dim=1) / exact.norm(dim=1)).max() > 2 * BOUND


def test_drafts_are_the_largest_true_logits_lowest_id_first() -> None:
    spec = drafter_spec()
    weights = drafter_weights(spec)

    def drafts(weights: DrafterWeights) -> list[int]:
        chosen = []
        for anchor in range(VOCAB):
            got = draft(Drafter(spec, weights, FLOAT64), tap_rows(30), anchor, 30)
            for row, token in zip(got.logits[0], got.drafts[0].tolist(), strict=True):
                assert token == int((row == row.max()).nonzero()[0])
                chosen.append(token)
        return chosen

    often = max(range(VOCAB), key=drafts(weights).count)
    head, markov = weights.head.clone(), weights.markov_w2.clone()
    head[often - 1], markov[often - 1] = head[often], markov[often]  # a twin with a lower id
    head[VOCAB:] = head[often] * 50  # and padding columns that shout
    chosen = drafts(replace(weights, head=head, markov_w2=markov))
    assert often - 1 in chosen
    assert often not in chosen
    assert max(chosen) < VOCAB


@pytest.mark.parametrize("numerics", [NATIVE, FLOAT64], ids=["native", "float64"])
@pytest.mark.parametrize("chunks", [(16,), (1, 2, 37), (8, 16, 24, 32), (5,)])
def test_chunked_context_equals_whole_context(numerics: Any, chunks: tuple[int, ...]) -> None:
    drafter, taps = tiny(numerics=numerics), tap_rows(40)
    whole, cut = draft(drafter, taps, 3, 40), draft(drafter, taps, 3, 40, chunks)
    assert torch.equal(whole.logits, cut.logits)


@pytest.mark.parametrize("numerics", [NATIVE, FLOAT64], ids=["native", "float64"])
def test_a_request_drafts_the_same_alone_and_in_any_company(numerics: Any) -> None:
    drafter = tiny(numerics=numerics)
    lengths, anchors = [40, 3, 25], [5, 9, 14]
    contexts = []
    for i, n in enumerate(lengths):
        contexts.append(drafter.new_context(POSITIONS))
        drafter.write_context(contexts[-1], tap_rows(n, seed=i), 0)

    def together(order: list[int]) -> dict[int, Tensor]:
        got = drafter.propose(
            [contexts[i] for i in order],
            torch.tensor([anchors[i] for i in order]),
            torch.tensor([lengths[i] for i in order]),
            keep_logits=True,
        )
        assert got.logits is not None
        return dict(zip(order, got.logits, strict=True))

    alone = {i: together([i])[i] for i in range(3)}
    for order in ([0, 1], [1, 0], [2, 0, 1], [0, 1, 2]):
        for i, logits in together(order).items():
            assert torch.equal(logits, alone[i])


def test_context_at_and_behind_the_anchor_is_never_read() -> None:
    """Rejected rows may have been written or not: drafts are the same bits."""
    drafter, taps = tiny(), tap_rows(30)
    clean = draft(drafter, taps, 3, 30)
    for stale in (tap_rows(8, seed=9), torch.full((8, 3 * H), float("nan")).bfloat16()):
        context = drafter.new_context(POSITIONS)
        drafter.write_context(context, taps, 0)
        drafter.write_context(context, stale, 30)
        got = drafter.propose([context], torch.tensor([3]), torch.tensor([30]), keep_logits=True)
        assert got.logits is not None
        assert torch.equal(got.logits, clean.logits)
    # and written again after a rewind, they are as if written once
    drafter.write_context(context, tap_rows(4, seed=10), 30)
    fresh = draft(drafter, torch.cat([taps, tap_rows(4, seed=10)]), 3, 34)
    again = drafter.propose([context], torch.tensor([3]), torch.tensor([34]), keep_logits=True)
    assert again.logits is not None
    assert torch.equal(again.logits, fresh.logits)


def test_the_window_ends_where_it_says() -> None:
    """With W = 12 the last block row, at P + 6, reads from P - 5; the first one, at P, from P - 11."""
    drafter, taps, P = tiny(window=12), tap_rows(40), 40

    def after_changing(position: int) -> Tensor:
        other = taps.clone()
        other[position] = tap_rows(1, seed=77)[0]
        return draft(drafter, other, 3, P).logits

    base = draft(drafter, taps, 3, P).logits
    assert torch.equal(after_changing(P - 12), base)
    assert not torch.equal(after_changing(P - 11)[0, 0], base[0, 0])
    assert not torch.equal(draft(tiny(window=13), taps, 3, P).logits, base)
    assert not torch.equal(draft(tiny(window=None), taps, 3, P).logits, base)


def test_a_window_as_long_as_the_context_changes_nothing() -> None:
    taps = tap_rows(20)
    wide, none = (draft(tiny(window=w), taps, 3, 20).logits for w in (27, None))
    assert torch.equal(wide, none)  # the last row, at 26, reads from 0
    assert not torch.equal(draft(tiny(window=20), taps, 3, 20).logits, none)


def test_another_block_width_is_another_drafter() -> None:
    taps = tap_rows(30)
    seven, five = (draft(tiny(block=b), taps, 3, 30).logits for b in (7, 5))
    assert not torch.equal(seven[0, 0], five[0, 0])  # from the first slot on: attention is two-way


def test_without_the_markov_term_drafts_change() -> None:
    spec = drafter_spec()
    weights = drafter_weights(spec)
    off = replace(weights, markov_w2=torch.zeros_like(weights.markov_w2))
    taps = tap_rows(30)
    with_it, without = (draft(Drafter(spec, w, FLOAT64), taps, 3, 30) for w in (weights, off))
    assert not torch.equal(with_it.drafts, without.drafts)


def test_another_order_of_sums_is_within_the_rounding_bound() -> None:
    taps = tap_rows(30)
    want = draft(tiny(), taps, 3, 30).logits[0, 0]  # the first slot's prefix is the anchor in every arm
    for numerics in (NATIVE, reordered(3)):
        got = draft(tiny(numerics=numerics), taps, 3, 30).logits[0, 0]
        assert (got - want).norm() / want.norm() < BOUND


Change = Callable[[Drafter, Any], object]


def propose(*given: Tensor, requests: int = 1) -> Change:
    return lambda drafter, context: drafter.propose([context] * requests, *given)


def write(taps: Tensor, start: int) -> Change:
    return lambda drafter, context: drafter.write_context(context, taps, start)


one, four = torch.tensor([1]), torch.tensor([4])


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (propose(torch.tensor([VOCAB]), four), "anchor from 0 to 59, got 60"),
        (propose(torch.tensor([-1]), four), "anchor from 0 to 59, got -1"),
        (propose(one, torch.tensor([5])), "holds 4 positions, its anchor"),
        (propose(one, four, requests=2), r"anchors: expected int64 \[2\]"),
        (propose(one, four.int()), "positions: expected int64"),
        (write(tap_rows(1), 6), "from at most position 4, got 6"),
        (write(tap_rows(5), 4), "at most 8 positions, got 9"),
        (write(tap_rows(1).float(), 4), "taps: expected bfloat16"),
        (write(tap_rows(1)[:, 1:], 4), "taps: expected bfloat16"),
    ],
)
def test_misuse_is_named_and_changes_nothing(call: Change, expected: str) -> None:
    drafter = tiny()
    context = drafter.new_context(8)
    drafter.write_context(context, tap_rows(4), 0)
    before = context.k.clone()
    with pytest.raises(ValueError, match=expected):
        call(drafter, context)
    assert context.written == 4
    assert torch.equal(context.k.view(torch.int16), before.view(torch.int16))


def test_a_weight_of_another_shape_is_named() -> None:
    spec = drafter_spec()
    weights = drafter_weights(spec)
    with pytest.raises(ValueError, match=r"drafter.fc: expected \[64, 192\], got \[64, 128\]"):
        Drafter(spec, replace(weights, fc=weights.fc[:, :128]))
    broken = replace(weights.layers[1], down=weights.layers[1].down[:32])
    with pytest.raises(ValueError, match=r"layers.1.down: expected \[64, 96\], got \[32, 96\]"):
        Drafter(spec, replace(weights, layers=(weights.layers[0], broken)))


# From a checkpoint

CONFIG: dict[str, Any] = {
    "architectures": ["DSparkMiniMaxDraftModel"],
    "hidden_size": H,
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": D,
    "rotary_dim": ROTARY,
    "rope_theta": THETA,
    "rms_norm_eps": EPS,
    "dense_intermediate_size": 96,
    "dspark_ffn_hidden_size": 96,
    "dspark_target_layer_ids": [-1, 1, 3],
    "dspark_block_size": 7,
    "dspark_markov_rank": 8,
    "dspark_markov_head_type": "vanilla",
    "dspark_noise_token_id": 59,
    "sliding_window": 24,
    "layer_types": ["sliding_attention"] * 2,
    "use_gemma_norm": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "dspark_hybrid_context_fusion": False,
    "enable_confidence_head": True,
}


class Stored:
    """The weights of `drafter_weights` under the names of a released checkpoint."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.text_config = config
        w = drafter_weights(drafter_spec())
        self.tensors = {
            "fc.weight": w.fc,
            "hidden_norm.weight": w.context_norm,
            "final_norm.weight": w.final_norm,
            "markov_head.markov_w1.weight": w.markov_w1,
            "markov_head.markov_w2.weight": w.markov_w2,
            "confidence_head.proj.weight": torch.zeros(1, H + 8).bfloat16(),
            "confidence_head.proj.bias": torch.zeros(1).bfloat16(),
        }
        self.matrices = {}
        for i, layer in enumerate(w.layers):
            at = f"layers.{i}.decoder_layer."
            for name, norm in (
                ("input_layernorm", layer.input_norm),
                ("post_attention_layernorm", layer.post_norm),
                ("self_attn.q_norm", layer.q_norm),
                ("self_attn.k_norm", layer.k_norm),
            ):
                self.tensors[f"{at}{name}.weight"] = norm
            for letter in "qkvo":
                self.matrices[f"{at}self_attn.{letter}_proj"] = getattr(layer, letter)
            for name in ("gate", "up", "down"):
                self.matrices[f"{at}mlp.{name}_proj"] = getattr(layer, name)

    def tensor(self, name: str) -> Tensor:
        return self.tensors.pop(name)  # every name once

    def matrix(self, prefix: str) -> Matrix:
        return self.matrices.pop(prefix)


def test_a_checkpoint_gives_the_same_drafter_and_every_tensor_is_used() -> None:
    stored, w = Stored(CONFIG), drafter_weights(drafter_spec())
    loaded = load_drafter(stored, w.embed, w.head, "cpu", POSITIONS, numerics=FLOAT64)
    assert not stored.tensors
    assert not stored.matrices
    assert loaded.spec == drafter_spec()
    taps = tap_rows(30)
    assert torch.equal(draft(loaded, taps, 3, 30).logits, draft(tiny(), taps, 3, 30).logits)
    assert w.head.shape[0] == PADDED


def test_full_attention_layers_have_no_window() -> None:
    spec = DrafterSpec.from_config({**CONFIG, "layer_types": ["full_attention"] * 2})
    assert spec.window is None


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("dspark_markov_head_type", "gated", "expected 'vanilla', .*, got 'gated'"),
        ("use_gemma_norm", False, "expected True, .*, got False"),
        ("dspark_hybrid_context_fusion", True, "expected False, .*, got True"),
        ("hidden_act", "silu", "hidden_act: expected 'swigluoai'"),
        ("attention_output_gate", True, "attention_output_gate: expected False"),
        ("rope_scaling", {"type": "yarn"}, "rope_scaling: expected none, got"),
        ("layer_types", "full_attention", "layer_types: expected all"),
        ("num_key_value_heads", 0, "num_key_value_heads: expected at least 1, got 0"),
        ("hidden_size", "64", "hidden_size: expected an integer, got '64'"),
        ("hidden_size", 64.5, "hidden_size: expected an integer, got 64.5"),
        ("head_dim", None, "head_dim: missing"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps: expected a positive number, got nan"),
        ("dspark_target_layer_ids", [1.0, 3], "dspark_target_layer_ids: expected a list of integers"),
        ("dspark_target_layer_ids", 3, "dspark_target_layer_ids: expected a list, got 3"),
        ("dspark_block_size", 0, "dspark_block_size: expected at least 1, got 0"),
        ("rotary_dim", 7, "rotary_dim: expected an even number from 2 to head_dim 16, got 7"),
        ("rotary_dim", 18, "rotary_dim: expected an even number from 2 to head_dim 16, got 18"),
        ("rotary_dim", None, "expected rotary_dim or partial_rotary_factor, got none"),
        ("layer_types", ["full_attention", "sliding_attention"], "layer_types: expected all"),
        ("sliding_window", None, "sliding_window: missing"),
        ("rope_theta", None, "rope_theta: missing"),
        ("dspark_target_layer_ids", [3, 1], "strictly increasing"),
        ("dspark_noise_token_id", VOCAB, "noise_token: expected 0 to 59, got 60"),
        ("num_key_value_heads", 3, "4 heads do not divide over 3"),
    ],
)
def test_a_config_of_another_drafter_is_named(key: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        DrafterSpec.from_config({**CONFIG, key: value})
