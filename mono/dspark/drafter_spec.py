"""What a DSpark drafter is made of: its sizes, read from a configuration, and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mono.checkpoint.errors import CheckpointError
from mono.formats import Matrix
from mono.models.fields import Fields


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """Sizes and constants of a drafter.

    vocab:       true tokens; tables and heads may store more rows, which never win.
    taps:        decoder layers of the target whose residual stream is tapped, strictly increasing.
    block:       drafts per block. The block attends to itself both ways, so another width is another
                 drafter: its drafts differ from the first on.
    window:      W: a row reads keys at its own position - (W - 1) and later; None for all.
    noise_token: what stands in the block where the token is not yet known.
    """

    hidden: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    theta: float
    eps: float
    ffn: int
    taps: tuple[int, ...]
    block: int
    markov_rank: int
    window: int | None
    noise_token: int
    alpha: float
    beta: float
    limit: float

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"drafter: block: expected at least 1 draft, got {self.block}")
        if not self.taps or list(self.taps) != sorted(set(self.taps)) or self.taps[0] < -1:
            raise ValueError(f"drafter: taps: expected strictly increasing ids from -1, got {self.taps}")
        if self.heads % self.kv_heads:
            raise ValueError(f"drafter: {self.heads} heads do not divide over {self.kv_heads} KV heads")
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"drafter: rotary_dim: expected an even number from 2 to head_dim {self.head_dim},"
                f" got {self.rotary_dim}"
            )
        if not 0 <= self.noise_token < self.vocab:
            raise ValueError(f"drafter: noise_token: expected 0 to {self.vocab - 1}, got {self.noise_token}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"drafter: window: expected at least 1, got {self.window}")

    @staticmethod
    def from_config(config: Mapping[str, Any], vocab: int | None = None) -> DrafterSpec:
        """Read the drafter's `text_config`, in the field's names.

        vocab:   true tokens where the config's `vocab_size` counts padded rows as well.
        Errors:  CheckpointError naming a key that is missing, of another type or out of range, or a feature
                 that this drafter does not have: a Markov head other than `vanilla`, mixed layer types, norms
                 not in Gemma form, scaled RoPE, hybrid fusion. ValueError where two keys are at odds.
        """
        f = Fields("drafter config", config)

        def named(*names: str) -> str:
            for name in names:
                if f.has(name):
                    return name
            raise CheckpointError(f"{f.where}: expected {' or '.join(names)}, got none")

        for name, supported in (
            ("dspark_markov_head_type", "vanilla"),
            ("dspark_hybrid_context_fusion", False),
            ("dspark_use_dense_ffn", True),
            ("use_gemma_norm", True),
            ("use_qk_norm", True),
            ("qk_norm_type", "per_head"),
            ("hidden_act", "swigluoai"),
            ("attention_output_gate", False),
        ):
            f.only(name, supported, default=supported)
        if f.has("rope_scaling"):
            raise f.wrong("rope_scaling", "none", config["rope_scaling"])
        head_dim = f.integer("head_dim")
        kinds = config.get("layer_types") or ["sliding_attention"]
        if not isinstance(kinds, list) or kinds not in (
            [kind] * len(kinds) for kind in ("sliding_attention", "full_attention")
        ):
            raise f.wrong("layer_types", "all sliding_attention or all full_attention", kinds)
        rotary = named("rotary_dim", "partial_rotary_factor")
        return DrafterSpec(
            hidden=f.integer("hidden_size"),
            vocab=f.integer("vocab_size") if vocab is None else vocab,
            layers=f.integer("num_hidden_layers"),
            heads=f.integer("num_attention_heads"),
            kv_heads=f.integer("num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=f.integer(rotary) if rotary == "rotary_dim" else round(head_dim * f.number(rotary)),
            theta=f.number("rope_theta"),
            eps=f.number("rms_norm_eps"),
            ffn=f.integer(named("dspark_ffn_hidden_size", "dense_intermediate_size")),
            taps=f.integers(named("dspark_target_layer_ids", "target_layer_ids")),
            block=f.integer(named("dspark_block_size", "block_size")),
            markov_rank=f.integer(named("dspark_markov_rank", "markov_rank")),
            window=f.integer("sliding_window") if kinds[0] == "sliding_attention" else None,
            noise_token=f.integer(named("dspark_noise_token_id", "mask_token_id"), least=0),
            alpha=f.number("swiglu_alpha"),
            beta=f.number("swiglu_beta", default=1.0),
            limit=f.number("swiglu_limit"),
        )


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """input_norm, post_norm: [H] bf16; q_norm, k_norm: [D] bf16; all zero-centred, Gemma form.
    q:         [N x D, H];  k, v: [G x D, H];  o: [H, N x D].
    gate, up:  [F, H];  down: [H, F].
    """

    input_norm: Tensor
    q: Matrix
    k: Matrix
    v: Matrix
    q_norm: Tensor
    k_norm: Tensor
    o: Matrix
    post_norm: Tensor
    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class DrafterWeights:
    """fc:                      [H, m x H] bf16, taps to context.
    context_norm, final_norm:   [H] bf16, zero-centred, Gemma form.
    layers:                     one for each draft layer.
    markov_w1, markov_w2:       [V, r] bf16: what the token before adds to the logits is w2 w1[token].
    embed, head:                [V, H] bf16, the target's own.
    rope:                       [max_positions, rotary_dim] fp32, cos | sin.
    confidence, confidence_bias: [1, H + r] and [1], kept as stored; fixed verify asks for none.
    """

    fc: Tensor
    context_norm: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    markov_w1: Tensor
    markov_w2: Tensor
    embed: Tensor
    head: Tensor
    rope: Tensor
    confidence: Tensor | None = None
    confidence_bias: Tensor | None = None


def check_drafter_weights(spec: DrafterSpec, weights: DrafterWeights) -> None:
    """ValueError naming the first weight of another shape than the spec's."""
    s, w = spec, weights
    H, D = s.hidden, s.head_dim
    rows = w.head.shape[0]
    if rows < s.vocab:
        raise ValueError(f"drafter.head: expected at least {s.vocab} rows, got {rows}")
    if len(w.layers) != s.layers:
        raise ValueError(f"drafter.layers: expected {s.layers}, got {len(w.layers)}")
    want: list[tuple[str, Any, tuple[int, ...]]] = [
        ("fc", w.fc, (H, len(s.taps) * H)),
        ("context_norm", w.context_norm, (H,)),
        ("final_norm", w.final_norm, (H,)),
        ("embed", w.embed, (rows, H)),
        ("head", w.head, (rows, H)),
        ("rope", w.rope, (w.rope.shape[0], s.rotary_dim)),
    ]
    # the Markov tables have a row for each true token, and may have the padded ones
    want += [
        (name, table, (max(s.vocab, min(rows, table.shape[0])), s.markov_rank))
        for name, table in (("markov_w1", w.markov_w1), ("markov_w2", w.markov_w2))
    ]
    for i, layer in enumerate(w.layers):
        want += [
            (f"layers.{i}.{name}", getattr(layer, name), shape)
            for name, shape in (
                ("input_norm", (H,)),
                ("q", (s.heads * D, H)),
                ("k", (s.kv_heads * D, H)),
                ("v", (s.kv_heads * D, H)),
                ("q_norm", (D,)),
                ("k_norm", (D,)),
                ("o", (H, s.heads * D)),
                ("post_norm", (H,)),
                ("gate", (s.ffn, H)),
                ("up", (s.ffn, H)),
                ("down", (H, s.ffn)),
            )
        ]
    for name, value, shape in want:
        if tuple(value.shape) != shape:
            raise ValueError(f"drafter.{name}: expected {list(shape)}, got {list(value.shape)}")
