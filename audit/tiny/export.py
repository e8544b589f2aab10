"""Write a trained target and its drafter as a checkpoint in the field's layout.

    python -m audit.tiny.export --weights DIR --name m3.1 --drafter 400 --to audit/tiny/m3.1

Routed experts are MXFP4; attention, indexer, dense MLP, shared experts and the drafter's linears MXFP8; the
router and its correction bias fp32; all else bf16. `quantization_config` is Quark's, as of a checkpoint whose
excluded layers keep the MXFP8 of the release: its body speaks of the experts, its `exclude` of everything
else, and `mxfp8` of the excluded linears.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from audit.tiny.tokens import BOS, EOS, NOISE, PAD, TOKENS
from audit.tiny.training_model import Drafter, Experts, Shape, Target
from mono.checkpoint import write_checkpoint
from mono.formats import mxfp4, mxfp8

SHARD_BYTES = 6_000_000  # two files and an index, as a large checkpoint has
DRAFTER = "language_model.model.dspark."


def common_config(shape: Shape) -> dict[str, Any]:
    """What target and drafter have in common."""
    return {
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": TOKENS,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.eps,
        "use_gemma_norm": True,
        "rope_theta": shape.theta,
        "rotary_dim": shape.rotary,
        "partial_rotary_factor": shape.rotary / shape.head_dim,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "hidden_act": "swigluoai",
        "swiglu_alpha": shape.alpha,
        "swiglu_limit": shape.limit,
        "swiglu_beta": 1.0,
        "tie_word_embeddings": False,
        "attention_output_gate": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def target_config(shape: Shape) -> dict[str, Any]:
    """`config.json` of the target."""
    sparse = [int(shape.sparse(layer)) for layer in range(shape.layers)]
    weight = {
        "dtype": "fp4",
        "qscheme": "per_group",
        "group_size": 32,
        "ch_axis": -1,
        "is_dynamic": False,
        "scale_format": "e8m0",
        "scale_type": "float",
        "scale_calculation_mode": "even",
        "round_method": "half_even",
        "observer_cls": "PerBlockMXObserver",
    }
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "torch_dtype": "bfloat16",
        "text_config": {
            "architectures": ["MiniMaxM3SparseForCausalLM"],
            **common_config(shape),
            "num_hidden_layers": shape.layers,
            "intermediate_size": shape.expert_width,
            "dense_intermediate_size": shape.dense_width,
            "shared_intermediate_size": shape.expert_width,
            "num_local_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "n_shared_experts": 1,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "routed_scaling_factor": shape.routed_factor,
            "moe_layer_freq": [int(layer >= shape.dense_layers) for layer in range(shape.layers)],
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_attention_freq": sparse,
                "sparse_index_dim": shape.head_dim,
                "sparse_num_index_heads": shape.kv_heads,
                "sparse_topk_blocks": shape.kv_blocks,
                "sparse_block_size": shape.kv_block,
                "sparse_score_type": "max",
                "sparse_init_block": 0,
                "sparse_local_block": 1,
                "sparse_disable_index_value": sparse,
            },
        },
        "quantization_config": {
            "quant_method": "quark",
            "quant_mode": "eager_mode",
            "global_quant_config": {"weight": weight, "input_tensors": {**weight, "is_dynamic": True}},
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "kv_cache_quant_config": {},
            "export": {"pack_method": "reorder", "weight_format": "real_quantized", "kv_cache_group": []},
            "exclude": [
                "*lm_head",
                "*embed_tokens",
                "*block_sparse_moe.gate",
                "*block_sparse_moe.shared_experts*",
                "*self_attn*",
                "*mlp.gate_proj",
                "*mlp.up_proj",
                "*mlp.down_proj",
            ],
            "mxfp8": {"weight_block_size": [1, 32]},
        },
    }


def drafter_config(shape: Shape) -> dict[str, Any]:
    """`dspark/config.json`."""
    return {
        "architectures": ["DSparkMiniMaxDraftModel"],
        "model_type": "minimax_m3_dspark",
        "torch_dtype": "bfloat16",
        "text_config": {
            **common_config(shape),
            "num_hidden_layers": shape.draft_layers,
            "dense_intermediate_size": shape.draft_width,
            "dspark_ffn_hidden_size": shape.draft_width,
            "dspark_use_dense_ffn": True,
            "dspark_hybrid_context_fusion": False,
            "dspark_block_size": shape.draft_len,
            "dspark_markov_rank": shape.markov_rank,
            "dspark_markov_head_type": "vanilla",
            "dspark_noise_token_id": NOISE,
            "dspark_target_layer_ids": list(shape.taps),
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "sliding_window": shape.window,
            "layer_types": ["sliding_attention"] * shape.draft_layers,
            "moe_layer_freq": [0] * shape.draft_layers,
            "sparse_attention_config": None,
        },
        "quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
    }


def _mxfp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    made = mxfp8.quantise(weight)
    return {f"{name}.weight": made.values, f"{name}.weight_scale_inv": made.scale}


def _mxfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    made = mxfp4.quantise(weight)
    return {f"{name}.weight": made.packed, f"{name}.weight_scale": made.scale}


def _experts(at: str, experts: Experts) -> dict[str, Tensor]:
    made = {
        f"{at}.gate.weight": experts.gate.float(),
        f"{at}.e_score_correction_bias": experts.bias.float(),
    }
    for expert in range(experts.shape.experts):
        for part in ("w1", "w2", "w3"):
            made |= _mxfp4(f"{at}.experts.{expert}.{part}", getattr(experts, part)[expert])
    for part, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        made |= _mxfp8(f"{at}.shared_experts.{name}", getattr(experts, part)[-1])
    return made


def target_tensors(target: Target) -> dict[str, Tensor]:
    """Stored tensors by the field's names. `target` is as `rounded_to_storage` gives it."""
    shape = target.shape
    made = {"language_model.model.embed_tokens.weight": target.embed.bfloat16()}
    for number, layer in enumerate(target.layers):
        at = f"language_model.model.layers.{number}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{at}.{norm}.weight"] = getattr(layer, norm).bfloat16()
        names = ["q", "k", "v", "o"] + ["index_q", "index_k"] * shape.sparse(number)
        for name in names:
            made |= _mxfp8(f"{at}.self_attn.{name}_proj", getattr(layer.self_attn, f"{name}_proj").weight)
            if name not in ("v", "o"):
                made[f"{at}.self_attn.{name}_norm.weight"] = getattr(
                    layer.self_attn, f"{name}_norm"
                ).bfloat16()
        if isinstance(layer.mlp, Experts):
            made |= _experts(f"{at}.block_sparse_moe", layer.mlp)
        else:
            for name in ("gate_proj", "up_proj", "down_proj"):
                made |= _mxfp8(f"{at}.mlp.{name}", getattr(layer.mlp, name).weight)
    made["language_model.model.norm.weight"] = target.norm.bfloat16()
    made["language_model.lm_head.weight"] = target.head.bfloat16()
    return made


def drafter_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """Stored tensors of the drafter by the field's names."""
    plain: dict[str, Tensor] = {
        "fc.weight": drafter.fc,
        "hidden_norm.weight": drafter.hidden_norm,
        "final_norm.weight": drafter.final_norm,
        "markov_head.markov_w1.weight": drafter.markov_w1,
        "markov_head.markov_w2.weight": drafter.markov_w2,
        "confidence_head.proj.weight": drafter.confidence,
        "confidence_head.proj.bias": drafter.confidence_bias,
    }
    made = {name: value.bfloat16() for name, value in plain.items()}
    for number, layer in enumerate(drafter.layers):
        at = f"layers.{number}.decoder_layer"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{at}.{norm}.weight"] = getattr(layer, norm).bfloat16()
        for name in ("q", "k", "v", "o"):
            made |= _mxfp8(f"{at}.self_attn.{name}_proj", getattr(layer, f"{name}_proj").weight)
        for name in ("q_norm", "k_norm"):
            made[f"{at}.self_attn.{name}.weight"] = getattr(layer, name).bfloat16()
        for name in ("gate_proj", "up_proj", "down_proj"):
            made |= _mxfp8(f"{at}.mlp.{name}", getattr(layer.mlp, name).weight)
    return {f"{DRAFTER}{name}": value for name, value in made.items()}


def export(target: Target, drafter: Drafter, folder: Path) -> None:
    """Write `folder`, which must not exist. Both models are as `rounded_to_storage` gives them."""
    write_checkpoint(
        folder,
        target_config(target.shape),
        target_tensors(target),
        shard_bytes=SHARD_BYTES,
        drafter=(drafter_config(drafter.shape), drafter_tensors(drafter)),
    )


def main(arguments: list[str]) -> None:
    from audit.tiny.train import SHAPES, load_drafter, load_target

    parser = argparse.ArgumentParser(prog="audit.tiny.export", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--weights", type=Path, required=True, help="folder that audit.tiny.train wrote")
    parser.add_argument("--name", choices=list(SHAPES), required=True)
    parser.add_argument("--drafter", type=int, required=True, help="steps of the drafter's snapshot")
    parser.add_argument("--to", type=Path, required=True)
    asked = parser.parse_args(arguments)
    shape = SHAPES[asked.name]
    target = load_target(shape, asked.weights / asked.name)
    drafter = load_drafter(shape, asked.weights / f"{asked.name}-drafters.safetensors", asked.drafter)
    export(target.requires_grad_(False), drafter.requires_grad_(False), asked.to)


if __name__ == "__main__":
    main(sys.argv[1:])
