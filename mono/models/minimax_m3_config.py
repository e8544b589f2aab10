"""MiniMax-M3 and M3.1: the configuration of the text decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mono.checkpoint import CheckpointError
from mono.models.fields import Fields

# copied by serving engines from the top level into the text part, where a user sets them
OVERRIDES = ("use_index_cache", "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset")


@dataclass(frozen=True, slots=True)
class Config:
    """The text decoder's configuration, every field checked.

    layers, sparse, moe:   decoder layers; which have sparse attention, and which experts.
    intermediate:          width of a routed expert; dense_intermediate and shared_intermediate likewise.
    vocab:                 true vocabulary; the stored tables may have more rows.
    max_positions:         positions the model was made for.
    rotary_dim:            leading dims of a head that RoPE turns.
    alpha, beta, limit:    SwiGLU-OAI's slope, offset and clamp.
    selects:               which layers pick KV blocks; the other sparse ones reuse the latest pick.
    """

    hidden: int
    layers: int
    vocab: int
    max_positions: int
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    sparse: tuple[bool, ...]
    selects: tuple[bool, ...]
    block_size: int
    index_dim: int
    topk_blocks: int
    init_blocks: int
    local_blocks: int
    moe: tuple[bool, ...]
    intermediate: int
    dense_intermediate: int
    shared_intermediate: int
    experts: int
    topk: int
    shared_experts: int
    scaling: float
    alpha: float
    beta: float
    limit: float

    @staticmethod
    def of(config: Mapping[str, Any], file: str = "config.json") -> Config:
        """From a `config.json`, whole; the text part is its `text_config`, or itself without one.

        Defaults exist only where the released file leaves a field out: `swiglu_beta` 1.0, no output gate, an
        untied head, no cross-layer reuse of selections. All other fields must be there.
        Errors:  CheckpointError naming the field: missing, of another type, out of range, not supported, or
                 at odds with another field.
        """
        text = config.get("text_config", config)
        if not isinstance(text, dict):
            raise CheckpointError(f"{file}: text_config: expected an object, got {type(text).__name__}")
        f = Fields(f"{file}: text_config" if "text_config" in config else f"{file}: top level", text)
        for name in OVERRIDES:
            if text is not config and config.get(name) is not None:
                if f.has(name) and text[name] != config[name]:
                    raise f.wrong(name, f"{config[name]!r}, as at the top level", text[name])
                f.values = {**f.values, name: config[name]}

        f.only("hidden_act", "swigluoai")
        f.only("use_gemma_norm", True)
        f.only("attention_output_gate", False, default=False)
        f.only("tie_word_embeddings", False, default=False)
        f.only("use_qk_norm", True)
        f.only("qk_norm_type", "per_head")
        f.only("scoring_func", "sigmoid")
        f.only("use_routing_bias", True)

        layers = f.integer("num_hidden_layers")
        heads, kv_heads = f.integer("num_attention_heads"), f.integer("num_key_value_heads")
        if heads % kv_heads:
            raise f.wrong("num_attention_heads", f"a multiple of {kv_heads} KV heads", heads)
        experts, topk = f.integer("num_local_experts"), f.integer("num_experts_per_tok")
        if topk > experts:
            raise f.wrong("num_experts_per_tok", f"at most {experts} experts", topk)
        shared_experts = f.integer("n_shared_experts", least=0)
        if shared_experts > 1:
            raise f.wrong("n_shared_experts", "0 or 1", shared_experts)
        head_dim = f.integer("head_dim")

        s = f.inner("sparse_attention_config")
        s.only("use_sparse_attention", True)
        s.only("sparse_score_type", "max")
        sparse = s.per_layer("sparse_attention_freq", layers)
        index_value_off = s.per_layer("sparse_disable_index_value", layers)
        if any(is_sparse and not off for is_sparse, off in zip(sparse, index_value_off, strict=True)):
            raise s.wrong(
                "sparse_disable_index_value", "nonzero at every sparse layer", list(map(int, index_value_off))
            )
        index_heads = s.integer("sparse_num_index_heads")
        if index_heads != kv_heads:
            raise s.wrong("sparse_num_index_heads", f"{kv_heads}, one per KV head", index_heads)
        topk_blocks = s.integer("sparse_topk_blocks")
        init_blocks, local_blocks = s.integer("sparse_init_block", 0), s.integer("sparse_local_block", 0)
        if init_blocks + local_blocks > topk_blocks:
            raise s.wrong("sparse_topk_blocks", f"at least {init_blocks + local_blocks} forced", topk_blocks)
        index_dim = s.integer("sparse_index_dim")

        rotary_dim, theta = _rope(f, head_dim)
        if rotary_dim > min(head_dim, index_dim):
            raise f.wrong("rotary_dim", f"at most {min(head_dim, index_dim)}", rotary_dim)

        return Config(
            hidden=f.integer("hidden_size"),
            layers=layers,
            vocab=f.integer("vocab_size"),
            max_positions=f.integer("max_position_embeddings"),
            eps=f.number("rms_norm_eps"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=theta,
            sparse=sparse,
            selects=_selects(f, sparse),
            block_size=s.integer("sparse_block_size"),
            index_dim=index_dim,
            topk_blocks=topk_blocks,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            moe=f.per_layer("moe_layer_freq", layers),
            intermediate=f.integer("intermediate_size"),
            dense_intermediate=f.integer("dense_intermediate_size"),
            shared_intermediate=f.integer("shared_intermediate_size"),
            experts=experts,
            topk=topk,
            shared_experts=shared_experts,
            scaling=f.number("routed_scaling_factor"),
            alpha=f.number("swiglu_alpha"),
            beta=f.number("swiglu_beta", default=1.0),
            limit=f.number("swiglu_limit"),
        )


def _rope(f: Fields, head_dim: int) -> tuple[int, float]:
    """Rotary dims and base, from the text part or from its `rope_parameters`; no scaling is supported."""
    if f.has("rope_scaling"):
        raise f.wrong("rope_scaling", "none", f.values["rope_scaling"])
    if f.has("rope_parameters"):
        inner = f.inner("rope_parameters")
        for name in ("rope_type", "type"):  # `type` is the field's older word
            inner.only(name, "default", default="default")
        for name in ("rope_theta", "partial_rotary_factor"):
            if inner.has(name) and f.has(name) and inner.values[name] != f.values[name]:
                raise inner.wrong(name, f"{f.values[name]!r}, as outside", inner.values[name])
        outside = {name: value for name, value in f.values.items() if value is not None}
        f = Fields(f.where, {**inner.values, **outside})
    if not f.has("rotary_dim") and not f.has("partial_rotary_factor"):
        raise CheckpointError(f"{f.where}.rotary_dim: missing, and partial_rotary_factor too")
    factor = f.number("partial_rotary_factor") if f.has("partial_rotary_factor") else None
    rotary_dim = f.integer("rotary_dim") if f.has("rotary_dim") else round(head_dim * (factor or 0.0))
    if factor is not None and rotary_dim != head_dim * factor:
        raise f.wrong("rotary_dim", f"{head_dim * factor:g} = head_dim x partial_rotary_factor", rotary_dim)
    if rotary_dim % 2:
        raise f.wrong("rotary_dim", "an even number", rotary_dim)
    return rotary_dim, f.number("rope_theta")


def _selects(f: Fields, sparse: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which layers pick KV blocks.

    o counts sparse layers from 0. With `use_index_cache`, sparse layer o reuses the latest pick if

        index_topk_pattern[o] == "S"                                where a pattern is given
        max(o - index_skip_topk_offset, 0) % index_topk_freq != 0   otherwise
    """
    reuse = f.switch("use_index_cache", default=False)
    freq = f.integer("index_topk_freq", default=1)
    offset = f.integer("index_skip_topk_offset", least=0, default=0)
    pattern = f.text("index_topk_pattern", default=None)
    count = sum(sparse)
    if pattern is not None and len(pattern) != count:
        raise f.wrong("index_topk_pattern", f"{count} letters, one per sparse layer", pattern)
    if not reuse:
        return sparse
    if pattern is not None:
        picks = [letter != "S" for letter in pattern]
    else:
        picks = [max(o - offset, 0) % freq == 0 for o in range(count)]
    if count and not picks[0]:
        raise f.wrong("index_topk_pattern", "the first sparse layer to select, not S", pattern)
    ordinal = accumulate(sparse, initial=0)
    return tuple(is_sparse and picks[o] for is_sparse, o in zip(sparse, ordinal, strict=False))
