"""Every field of the configuration is read, checked, and never invented."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoint.make import STACKS, released_config

from mono.checkpoint import CheckpointError
from mono.models.minimax_m3 import Config


def changed(stack: str = "m3", sparse: dict[str, Any] | None = None, **text: Any) -> dict[str, Any]:
    """The released configuration with fields changed; a field of value ... is taken out."""
    config = released_config(stack)
    inner = config["text_config"]
    inner |= text
    if sparse is not None:
        inner["sparse_attention_config"] |= sparse
    for fields in (inner, inner["sparse_attention_config"] if sparse else {}):
        for name in [name for name, value in fields.items() if value is ...]:
            del fields[name]
    return config


def test_the_released_configuration() -> None:
    config = Config.of(released_config("m3"))
    assert (config.hidden, config.layers, config.heads, config.kv_heads, config.head_dim) == (
        6144,
        60,
        64,
        4,
        128,
    )
    assert (config.rotary_dim, config.rope_theta, config.eps) == (64, 5e6, 1e-6)
    assert (config.experts, config.topk, config.shared_experts, config.scaling) == (128, 4, 1, 2.0)
    assert (config.alpha, config.beta, config.limit) == (1.702, 1.0, 7.0)
    assert (config.topk_blocks, config.block_size, config.init_blocks, config.local_blocks) == (16, 128, 0, 1)
    assert config.sparse == config.moe == (False,) * 3 + (True,) * 57
    assert Config.of(released_config("m3.1")).sparse == (True,) * 60


def test_a_text_only_configuration_is_the_same() -> None:
    config = released_config("m3")
    assert Config.of(config["text_config"]) == Config.of(config)


# cross-layer reuse


def selecting(stack: str, **fields: Any) -> list[int]:
    config = Config.of(changed(stack, use_index_cache=True, **fields))
    assert all(is_sparse for is_sparse, picks in zip(config.sparse, config.selects, strict=True) if picks)
    return [layer for layer, picks in enumerate(config.selects) if picks]


@pytest.mark.parametrize(
    ("freq", "m3", "m3_1"),
    [
        (1, list(range(3, 60)), list(range(60))),
        (2, list(range(3, 60, 2)), list(range(0, 60, 2))),
        (3, list(range(3, 60, 3)), list(range(0, 60, 3))),
        (4, list(range(3, 60, 4)), list(range(0, 60, 4))),
    ],
)
def test_a_frequency_counts_sparse_layers(freq: int, m3: list[int], m3_1: list[int]) -> None:
    assert selecting("m3", index_topk_freq=freq) == m3
    assert selecting("m3.1", index_topk_freq=freq) == m3_1
    assert (len(m3), len(m3_1)) == {1: (57, 60), 2: (29, 30), 3: (19, 20), 4: (15, 15)}[freq]
    assert 3 in m3
    assert (3 in m3_1) == (freq in (1, 3))


def test_an_offset_lets_the_first_layers_select() -> None:
    assert selecting("m3.1", index_topk_freq=4, index_skip_topk_offset=2)[:5] == [0, 1, 2, 6, 10]


def test_a_pattern_overrides_the_frequency() -> None:
    assert selecting("m3", index_topk_freq=4, index_topk_pattern="F" + "SF" * 28) == [3, *range(5, 60, 2)]


def test_nothing_is_reused_unless_switched_on() -> None:
    config = Config.of(changed("m3.1", index_topk_freq=4, index_topk_pattern="S" * 60))
    assert config.selects == (True,) * 60


def test_overrides_may_stand_at_the_top_level() -> None:
    config = released_config("m3.1") | {"use_index_cache": True, "index_topk_freq": 2}
    assert Config.of(config).selects == (True, False) * 30
    config["text_config"]["index_topk_freq"] = 3
    with pytest.raises(
        CheckpointError, match=r"text_config.index_topk_freq: expected 2, as at the top .*, got 3$"
    ):
        Config.of(config)


# rotary dims


@pytest.mark.parametrize(
    "fields",
    [
        {"rotary_dim": ...},
        {"partial_rotary_factor": ...},
        {"rotary_dim": ..., "partial_rotary_factor": ..., "rope_parameters": {"partial_rotary_factor": 0.5}},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5000000}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5000000}},
    ],
)
def test_rotary_dims_and_base_have_several_spellings(fields: dict[str, Any]) -> None:
    config = Config.of(changed(**fields))
    assert (config.rotary_dim, config.rope_theta) == (64, 5e6)


# what is wrong

REQUIRED = [
    name
    for name in released_config("m3")["text_config"]
    if name
    not in {
        "attention_output_gate",
        "tie_word_embeddings",
        "rotary_dim",
        "partial_rotary_factor",
        "num_mtp_modules",
        "num_nextn_predict_layers",
    }
]


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_is_named(stack: str, name: str) -> None:
    config = released_config(stack)
    del config["text_config"][name]
    with pytest.raises(CheckpointError, match=rf"^x.json: text_config.{name}: missing$"):
        Config.of(config, "x.json")


@pytest.mark.parametrize("name", list(released_config("m3")["text_config"]["sparse_attention_config"]))
def test_a_missing_field_of_the_sparse_attention_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"text_config.sparse_attention_config.{name}: missing$"):
        Config.of(changed(sparse={name: ...}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act: expected 'swigluoai', the one supported value, got 'silu'"),
        ({"use_gemma_norm": False}, "use_gemma_norm: expected True, .*, got False"),
        ({"use_gemma_norm": 1}, "use_gemma_norm: expected True, .*, got 1"),
        ({"attention_output_gate": True}, "attention_output_gate: expected False, .*, got True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: expected False, .*, got True"),
        ({"use_qk_norm": False}, "use_qk_norm: expected True"),
        ({"qk_norm_type": "per_layer"}, "qk_norm_type: expected 'per_head'"),
        ({"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid'"),
        ({"use_routing_bias": False}, "use_routing_bias: expected True"),
        ({"hidden_size": "6144"}, "hidden_size: expected an integer, got '6144'"),
        ({"hidden_size": 6144.0}, "hidden_size: expected an integer, got 6144.0"),
        ({"hidden_size": True}, "hidden_size: expected an integer, got True"),
        ({"hidden_size": 0}, "hidden_size: expected at least 1, got 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps: expected a positive number, got -1e-06"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps: expected a positive number, got 1000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a positive number, got nan"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor: missing"),
        ({"num_key_value_heads": 5}, "num_attention_heads: expected a multiple of 5 KV heads, got 64"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok: expected at most 128 experts, got 129"),
        ({"n_shared_experts": 2}, "n_shared_experts: expected 0 or 1, got 2"),
        ({"moe_layer_freq": [0] * 59}, "moe_layer_freq: expected 60 integers, one per layer"),
        ({"moe_layer_freq": 1}, "moe_layer_freq: expected a list, got 1"),
        ({"sparse_attention_config": []}, r"sparse_attention_config: expected an object, got \[\]"),
        ({"rotary_dim": 32}, "rotary_dim: expected 64 = head_dim x partial_rotary_factor, got 32"),
        ({"rotary_dim": 63, "partial_rotary_factor": ...}, "rotary_dim: expected an even number, got 63"),
        ({"rotary_dim": 256, "partial_rotary_factor": 2.0}, "rotary_dim: expected at most 128, got 256"),
        (
            {"rotary_dim": ..., "partial_rotary_factor": ...},
            "rotary_dim: missing, and partial_rotary_factor too",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: expected none, got"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type: expected 'default'"),
        ({"rope_parameters": {"type": "yarn"}}, "rope_parameters.type: expected 'default'"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_theta: expected 5000000, as outside, got 1000000.0"),
        ({"use_index_cache": 1}, "use_index_cache: expected true or false, got 1"),
        ({"index_topk_freq": 0}, "index_topk_freq: expected at least 1, got 0"),
        ({"index_skip_topk_offset": -1}, "index_skip_topk_offset: expected at least 0, got -1"),
        (
            {"index_topk_pattern": "FS"},
            "index_topk_pattern: expected 57 letters, one per sparse layer, got 'FS'",
        ),
        (
            {"use_index_cache": True, "index_topk_pattern": "S" + "F" * 56},
            "index_topk_pattern: expected the first sparse layer to select, not S",
        ),
    ],
)
def test_a_wrong_field_is_named(text: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Config.of(changed(**text))


@pytest.mark.parametrize(
    ("sparse", "message"),
    [
        ({"use_sparse_attention": False}, "use_sparse_attention: expected True"),
        ({"sparse_score_type": "mean"}, "sparse_score_type: expected 'max', .*, got 'mean'"),
        ({"sparse_num_index_heads": 8}, "sparse_num_index_heads: expected 4, one per KV head, got 8"),
        ({"sparse_attention_freq": [1] * 61}, "sparse_attention_freq: expected 60 integers"),
        (
            {"sparse_disable_index_value": [0] * 60},
            "sparse_disable_index_value: expected nonzero at every sparse",
        ),
        ({"sparse_topk_blocks": 0}, "sparse_topk_blocks: expected at least 1, got 0"),
        ({"sparse_local_block": -1}, "sparse_local_block: expected at least 0, got -1"),
        ({"sparse_init_block": 16}, "sparse_topk_blocks: expected at least 17 forced, got 16"),
        ({"sparse_index_dim": 32}, "rotary_dim: expected at most 32, got 64"),
    ],
)
def test_a_wrong_field_of_the_sparse_attention_is_named(sparse: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Config.of(changed(sparse=sparse))
