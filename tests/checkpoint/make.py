"""Synthetic checkpoints: random weights at tiny sizes in every stored layout, and the released sizes.

Names and shapes are written out here and not taken from `mono.models`, which is tested against them. Every
stored value is exact in bf16, so a BF16 checkpoint of the same values exists: `bf16_twin`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mono.checkpoint import write_checkpoint
from mono.formats import Matrix, Mxfp4, Mxfp8, Nvfp4, e2m1, e4m3, mxfp4, mxfp8

LM = "language_model."
LAYERS, DENSE = 4, 2
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INDEX_DIM = 64, 4, 2, 16, 16
WIDTH, DENSE_WIDTH, EXPERTS = 32, 96, 4
VOCAB, VOCAB_PADDED = 60, 64
STACKS = ("m3", "m3.1")

# layout: (routed experts, shared expert, attention and dense MLP, quantization_config)
NVFP4_RELEASE = "nvfp4 compressed-tensors"
NVFP4_MODELOPT = "nvfp4 modelopt"
QUARK: dict[str, Any] = {
    "quant_method": "quark",
    "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}},
}
LEFT_BY_QUARK = ["*lm_head", "*block_sparse_moe.gate", "*self_attn*", "*mlp.*_proj"]
LAYOUTS: dict[str, tuple[str, str, str, dict[str, Any] | None]] = {
    "bf16": ("bf16", "bf16", "bf16", None),
    "mxfp8": ("mxfp8", "mxfp8", "mxfp8", {"quant_method": "mxfp8", "weight_block_size": [1, 32]}),
    "quark": (
        "mxfp4",
        "mxfp8",
        "mxfp8",
        {**QUARK, "exclude": [*LEFT_BY_QUARK, "*block_sparse_moe.shared_experts*"]},
    ),
    "quark, shared too": ("mxfp4", "mxfp4", "bf16", {**QUARK, "exclude": LEFT_BY_QUARK}),
    "release": (
        NVFP4_RELEASE,
        "mxfp8",
        "mxfp8",
        {"quant_method": "mxfp8", "moe_quant_algo": "NVFP4", "moe_quant_format": "nvfp4-pack-quantized"},
    ),
    "modelopt": (NVFP4_MODELOPT, "mxfp8", "mxfp8", {"quant_method": "modelopt", "quant_algo": "MIXED"}),
}


@dataclass
class Made:
    """A checkpoint in memory. `matrices` holds what the tensors were made from, by prefix."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    matrices: dict[str, Matrix | Tensor]
    drafter: tuple[dict[str, Any], dict[str, Tensor]] | None = None
    shard_bytes: int = 40_000

    def write(self, path: Path) -> Path:
        write_checkpoint(path, self.config, self.tensors, self.shard_bytes, self.drafter)
        return path


def released_config(stack: str) -> dict[str, Any]:
    """The released text configuration; of M3.1 what its card says: the same, with every layer sparse."""
    after_prefix = [0] * 3 + [1] * 57
    sparse = after_prefix if stack == "m3" else [1] * 60
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "text_config": {
            "hidden_size": 6144,
            "num_hidden_layers": 60,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 3072,
            "dense_intermediate_size": 12288,
            "shared_intermediate_size": 3072,
            "vocab_size": 200064,
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-6,
            "use_gemma_norm": True,
            "attention_output_gate": False,
            "rope_theta": 5000000,
            "rotary_dim": 64,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "qk_norm_type": "per_head",
            "hidden_act": "swigluoai",
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "routed_scaling_factor": 2.0,
            "moe_layer_freq": after_prefix,
            "num_mtp_modules": 7,
            "num_nextn_predict_layers": 1,
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_attention_freq": sparse,
                "sparse_index_dim": 128,
                "sparse_num_index_heads": 4,
                "sparse_topk_blocks": 16,
                "sparse_block_size": 128,
                "sparse_score_type": "max",
                "sparse_init_block": 0,
                "sparse_local_block": 1,
                "sparse_disable_index_value": sparse,
            },
        },
    }


def tiny_config(stack: str) -> dict[str, Any]:
    """The same fields at sizes a test can run."""
    config = released_config(stack)
    prefix = [0] * DENSE + [1] * (LAYERS - DENSE)
    sparse = prefix if stack == "m3" else [1] * LAYERS
    config["text_config"] |= {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": WIDTH,
        "dense_intermediate_size": DENSE_WIDTH,
        "shared_intermediate_size": WIDTH,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rotary_dim": 8,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_layer_freq": prefix,
    }
    config["text_config"]["sparse_attention_config"] |= {
        "sparse_attention_freq": sparse,
        "sparse_index_dim": INDEX_DIM,
        "sparse_num_index_heads": KV_HEADS,
        "sparse_topk_blocks": 2,
        "sparse_block_size": 8,
        "sparse_disable_index_value": sparse,
    }
    return config


def make(stack: str = "m3.1", layout: str = "quark", drafter: bool = False, seed: int = 0) -> Made:
    """A checkpoint of random weights."""
    routed, shared, rest, quantisation = LAYOUTS[layout]
    config = tiny_config(stack)
    if quantisation is not None:
        config["quantization_config"] = copy.deepcopy(quantisation)
    made = Made(config, {}, {})
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=rng) * std).bfloat16()

    def matrix(prefix: str, n: int, k: int, stored: str) -> None:
        # rows and matrices of several magnitudes, so that scales differ along N and from matrix to matrix
        size = 2.0 ** torch.randint(-1, 2, (n, 1), generator=rng) * k**-0.5
        size = size * 2.0 ** torch.randint(-1, 2, (), generator=rng)
        stored_matrix, tensors = STORE[stored](normal(n, k).float() * size)
        made.matrices[prefix] = stored_matrix
        made.tensors |= {f"{prefix}.{suffix}": tensor for suffix, tensor in tensors.items()}

    made.tensors[f"{LM}model.embed_tokens.weight"] = normal(VOCAB_PADDED, HIDDEN)
    for layer in range(LAYERS):
        at = f"{LM}model.layers.{layer}."
        sparse = stack == "m3.1" or layer >= DENSE
        for name, size in (
            ("input_layernorm", HIDDEN),
            ("post_attention_layernorm", HIDDEN),
            ("self_attn.q_norm", HEAD_DIM),
            ("self_attn.k_norm", HEAD_DIM),
            *(
                (("self_attn.index_q_norm", INDEX_DIM), ("self_attn.index_k_norm", INDEX_DIM))
                if sparse
                else ()
            ),
        ):
            made.tensors[f"{at}{name}.weight"] = normal(size, std=0.1)
        for name, rows in (
            ("q_proj", HEADS * HEAD_DIM),
            ("k_proj", KV_HEADS * HEAD_DIM),
            ("v_proj", KV_HEADS * HEAD_DIM),
            *((("index_q_proj", KV_HEADS * INDEX_DIM), ("index_k_proj", INDEX_DIM)) if sparse else ()),
        ):
            matrix(f"{at}self_attn.{name}", rows, HIDDEN, rest)
        matrix(f"{at}self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM, rest)
        if layer < DENSE:
            matrix(f"{at}mlp.gate_proj", DENSE_WIDTH, HIDDEN, rest)
            matrix(f"{at}mlp.up_proj", DENSE_WIDTH, HIDDEN, rest)
            matrix(f"{at}mlp.down_proj", HIDDEN, DENSE_WIDTH, rest)
            continue
        block = f"{at}block_sparse_moe."
        made.tensors[f"{block}gate.weight"] = normal(EXPERTS, HIDDEN, std=HIDDEN**-0.5).float()
        made.tensors[f"{block}e_score_correction_bias"] = normal(EXPERTS, std=0.1).float()
        for e in range(EXPERTS):
            matrix(f"{block}experts.{e}.w1", WIDTH, HIDDEN, routed)
            matrix(f"{block}experts.{e}.w2", HIDDEN, WIDTH, routed)
            matrix(f"{block}experts.{e}.w3", WIDTH, HIDDEN, routed)
        matrix(f"{block}shared_experts.gate_proj", WIDTH, HIDDEN, shared)
        matrix(f"{block}shared_experts.up_proj", WIDTH, HIDDEN, shared)
        matrix(f"{block}shared_experts.down_proj", HIDDEN, WIDTH, shared)
    made.tensors[f"{LM}model.norm.weight"] = normal(HIDDEN, std=0.1)
    made.tensors[f"{LM}lm_head.weight"] = normal(VOCAB_PADDED, HIDDEN, std=HIDDEN**-0.5)
    if drafter:
        _, tensors = STORE["mxfp8"](normal(HEADS * HEAD_DIM, HIDDEN).float())
        at = f"{LM}model.dspark."
        made.drafter = (
            {
                "architectures": ["DSparkMiniMaxDraftModel"],
                "text_config": {"dspark_block_size": 7},
                "quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
            },
            {
                f"{at}fc.weight": normal(HIDDEN, 2 * HIDDEN),
                **{f"{at}layers.0.decoder_layer.self_attn.q_proj.{s}": t for s, t in tensors.items()},
            },
        )
    return made


def bf16_twin(made: Made) -> Made:
    """The BF16 checkpoint of the same values."""
    config = copy.deepcopy(made.config)
    config.pop("quantization_config", None)
    tensors = {
        name: tensor
        for name, tensor in made.tensors.items()
        if not any(name.startswith(f"{prefix}.") for prefix in made.matrices)
    }
    for prefix, matrix in made.matrices.items():
        exact = values(matrix)
        tensors[f"{prefix}.weight"] = exact.bfloat16()
        assert torch.equal(tensors[f"{prefix}.weight"].float(), exact)
    return Made(config, tensors, {})


def values(matrix: Matrix | Tensor) -> Tensor:
    """What a matrix means, fp32."""
    return matrix.float() if isinstance(matrix, Tensor) else matrix.dequantise()


Stored = tuple[Matrix | Tensor, dict[str, Tensor]]


def _bf16(w: Tensor) -> Stored:
    return w.bfloat16(), {"weight": w.bfloat16()}


def _mxfp8(w: Tensor) -> Stored:
    made: Mxfp8 = mxfp8.quantise(w)
    return made, {"weight": made.values, "weight_scale_inv": made.scale}


def _mxfp4(w: Tensor) -> Stored:
    made: Mxfp4 = mxfp4.quantise(w)
    return made, {"weight": made.packed, "weight_scale": made.scale}


def _nvfp4(w: Tensor, convention: str) -> Nvfp4:
    """With a power of two as the global scale, so that values are exact in bf16."""
    n, k = w.shape
    unit = 2.0 ** torch.ceil(torch.log2(w.abs().max() / (e4m3.MAX * e2m1.MAX)))
    blocks = w.reshape(n, k // 16, 16)
    scale = e4m3.encode((blocks.abs().amax(-1) / e2m1.MAX / unit).clamp(min=e4m3.SMALLEST))
    codes = e2m1.encode(blocks / (e4m3.decode(scale) * unit).unsqueeze(-1)).flatten(-2)
    stored_global = (1 / unit if convention == "compressed-tensors" else unit).reshape(())
    return Nvfp4(e2m1.pack(codes), scale, stored_global, convention)


def _release(w: Tensor) -> Stored:
    made = _nvfp4(w, "compressed-tensors")
    return made, {
        "weight_packed": made.packed,
        "weight_scale": made.scale,
        "weight_global_scale": made.global_scale.reshape(1),
    }


def _modelopt(w: Tensor) -> Stored:
    made = _nvfp4(w, "modelopt")
    return made, {
        "weight": made.packed,
        "weight_scale": made.scale,
        "weight_scale_2": made.global_scale,
        "input_scale": torch.tensor(0.25),
    }


STORE: dict[str, Callable[[Tensor], Stored]] = {
    "bf16": _bf16,
    "mxfp8": _mxfp8,
    "mxfp4": _mxfp4,
    NVFP4_RELEASE: _release,
    NVFP4_MODELOPT: _modelopt,
}
