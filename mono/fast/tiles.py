"""Launch settings of every kernel as data, by device class. Nothing is tuned at run time.

A tile decides the order of a sum, and a certificate certifies one order; so the settings are fixed,
and belong to what a certificate names.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

Settings = Mapping[str, int]

# kernel -> device class -> constexprs and launch options. `interpreter` has few programs and large
# tiles, because an interpreted operation costs the same whatever its size.
TILES: dict[str, dict[str, dict[str, int]]] = {
    "absorb_norm": {
        "interpreter": {"BLOCK_T": 16, "num_warps": 4},
        "gpu": {"BLOCK_T": 1, "num_warps": 8},
    },
    "quantise_rows": {
        "interpreter": {"BLOCK_T": 16, "num_warps": 4},
        "gpu": {"BLOCK_T": 1, "num_warps": 4},
    },
    "ptpc_linear": {
        "interpreter": {"BLOCK_T": 16, "BLOCK_N": 512, "BLOCK_K": 1024, "num_warps": 4},
        "gpu": {"BLOCK_T": 16, "BLOCK_N": 32, "BLOCK_K": 256, "num_warps": 4, "num_stages": 4},
    },
    "bf16_linear": {
        "interpreter": {"BLOCK_T": 16, "BLOCK_N": 512, "BLOCK_K": 1024, "num_warps": 4},
        "gpu": {"BLOCK_T": 16, "BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4},
    },
    "swiglu_ptpc": {
        "interpreter": {"BLOCK_T": 16, "num_warps": 4},
        "gpu": {"BLOCK_T": 1, "num_warps": 8},
    },
    "router_logits": {
        "interpreter": {"BLOCK_T": 16, "BLOCK_E": 128, "BLOCK_K": 1024, "STEPS": 8, "num_warps": 4},
        "gpu": {"BLOCK_T": 16, "BLOCK_E": 16, "BLOCK_K": 64, "STEPS": 3, "num_warps": 4, "num_stages": 2},
    },
    "choose": {
        "interpreter": {"BLOCK_T": 16, "num_warps": 4},
        "gpu": {"BLOCK_T": 1, "num_warps": 4},
    },
    # 3 stages: with 4, Triton 3.6 fails to compile the experts for gfx950
    "gate_up": {
        "interpreter": {"BLOCK_T": 16, "BLOCK_E": 8, "BLOCK_F": 128, "BLOCK_K": 512, "num_warps": 4},
        "gpu": {"BLOCK_T": 16, "BLOCK_E": 1, "BLOCK_F": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3},
    },
    "down": {
        "interpreter": {"BLOCK_T": 16, "BLOCK_E": 8, "BLOCK_N": 256, "BLOCK_K": 256, "num_warps": 4},
        "gpu": {"BLOCK_T": 16, "BLOCK_E": 1, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3},
    },
    "combine": {
        "interpreter": {"BLOCK_T": 16, "BLOCK_H": 1024, "num_warps": 4},
        "gpu": {"BLOCK_T": 1, "BLOCK_H": 1024, "num_warps": 4},
    },
    "embed": {
        "interpreter": {"BLOCK_T": 16, "BLOCK_H": 1024, "num_warps": 4},
        "gpu": {"BLOCK_T": 1, "BLOCK_H": 2048, "num_warps": 4},
    },
    "tile_top1": {
        "interpreter": {"BLOCK_T": 16, "BLOCK_V": 1024, "num_warps": 4},
        "gpu": {"BLOCK_T": 1, "BLOCK_V": 4096, "num_warps": 8},
    },
    "best_tile": {
        "interpreter": {"BLOCK_T": 16, "num_warps": 4},
        "gpu": {"BLOCK_T": 1, "num_warps": 1},
    },
    "norm_rope": {  # BLOCK_H is every head of a row where it is not named
        "interpreter": {"BLOCK_T": 16, "num_warps": 4},
        "gpu": {"BLOCK_T": 1, "BLOCK_H": 1, "num_warps": 1},
    },
    "block_scores": {  # KEYS a program, all queries of a request against them
        "interpreter": {"KEYS": 1024, "BLOCK_C": 64, "num_warps": 4},
        "gpu": {"KEYS": 128, "BLOCK_C": 64, "num_warps": 4, "num_stages": 1},
    },
    "select_blocks": {  # rows of at most NARROW or MIDDLE blocks take a shorter way
        "interpreter": {"BLOCK_R": 64, "NARROW": 64, "MIDDLE": 512, "num_warps": 4},
        "gpu": {"BLOCK_R": 1, "NARROW": 64, "MIDDLE": 512, "num_warps": 8},
    },
    "select_blocks_of_many": {
        "interpreter": {"BLOCK_R": 16, "NARROW": 64, "MIDDLE": 512, "num_warps": 4},
        "gpu": {"BLOCK_R": 1, "NARROW": 64, "MIDDLE": 2048, "num_warps": 16},
    },
    "attend_selected": {  # BLOCK_P pairs of a row and a KV head a program; its picked blocks in SPLITS parts
        "interpreter": {"BLOCK_P": 32, "SPLITS": 1, "num_warps": 4},
        "gpu": {"BLOCK_P": 1, "SPLITS": 16, "num_warps": 8, "num_stages": 1},
    },
    "attend": {  # BLOCK_P pairs of request and KV head, BLOCK_C queries, every SPLITS-th KEYS
        "interpreter": {"BLOCK_P": 8, "BLOCK_C": 64, "KEYS": 512, "SPLITS": 1, "num_warps": 4},
        "gpu": {"BLOCK_P": 1, "BLOCK_C": 128, "KEYS": 32, "SPLITS": 128, "num_warps": 8, "num_stages": 1},
    },
    "merge_splits": {
        "interpreter": {"BLOCK_R": 128, "num_warps": 4},
        "gpu": {"BLOCK_R": 1, "num_warps": 4},
    },
}


def device_class(device: torch.device) -> str:
    """`interpreter` for CPU tensors, else `gpu`: one table serves every named compile target."""
    return "interpreter" if device.type == "cpu" else "gpu"


def tile(kernel: str, device: torch.device) -> Settings:
    """The settings of a kernel on a device."""
    return MappingProxyType(TILES[kernel][device_class(device)])


def fitted(settings: Settings, **sizes: int) -> dict[str, int]:
    """`settings` with each named tile no larger than the next power of two of its size, nor below 32.

    32 is the smallest tile that every matrix unit takes.
    """
    limits = {name: max(32, 1 << (size - 1).bit_length()) for name, size in sizes.items()}
    return {name: min(value, limits.get(name, value)) for name, value in settings.items()}
