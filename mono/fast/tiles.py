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
