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
TILES: dict[str, dict[str, dict[str, int]]] = {}


def device_class(device: torch.device) -> str:
    """`interpreter` for CPU tensors, else `gpu`: one table serves every named compile target."""
    return "interpreter" if device.type == "cpu" else "gpu"


def tile(kernel: str, device: torch.device) -> Settings:
    """The settings of a kernel on a device."""
    return MappingProxyType(TILES[kernel][device_class(device)])
