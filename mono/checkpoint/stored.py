"""Recognise a stored matrix by the suffixes, dtypes and shapes of its tensors.

    format                suffixes and dtypes
    --------------------  ---------------------------------------------------------------------------------
    bf16                  weight BF16
    mxfp8                 weight F8_E4M3, weight_scale_inv U8 (or weight_scale U8)
    mxfp4 (Quark)         weight U8, weight_scale U8
    nvfp4 (c.-tensors)    weight_packed U8, weight_scale F8_E4M3, weight_global_scale F32, divides
    nvfp4 (ModelOpt)      weight U8, weight_scale F8_E4M3, weight_scale_2 F32, multiplies
    ptpc_fp8              weight F8_E4M3, weight_scale F32 [N] or [N, 1]

An E8M0 scale is stored as U8 or as F8_E8M0. `input_scale` and `input_global_scale`, calibrated scales of
activations, may be there and are not read: activations are quantised dynamically here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mono.checkpoint.errors import CheckpointError
from mono.checkpoint.shards import Entry
from mono.formats import Bf16, Matrix, Mxfp4, Mxfp8, Nvfp4, PtpcFp8, e8m0, mxfp4, mxfp8, nvfp4

UNREAD = ("input_scale", "input_global_scale")
SUFFIXES = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
)


@dataclass(frozen=True, slots=True)
class Found:
    """A stored matrix that was recognised.

    layout:  bf16, mxfp8, mxfp4, ptpc_fp8, "nvfp4 compressed-tensors" or "nvfp4 modelopt".
    shape:   [N, K] in values.
    parts:   its tensors by suffix.
    """

    prefix: str
    layout: str
    shape: tuple[int, ...]
    parts: Mapping[str, Entry]

    @property
    def format(self) -> str:
        """Name of the format, as `Matrix.format_name`."""
        return self.layout.split()[0]

    def __str__(self) -> str:
        return str(next(iter(self.parts.values())))


def find(prefix: str, parts: Mapping[str, Entry]) -> Found:
    """Recognise a matrix by its tensors, given by suffix; CheckpointError if they are no known format."""
    kinds = {suffix: "U8" if e.dtype == "F8_E8M0" else e.dtype for suffix, e in parts.items()}
    match kinds:
        case {"weight": "BF16", **rest} if not rest:
            layout, codes = "bf16", "weight"
        case {"weight": "F8_E4M3", "weight_scale_inv": "U8", **rest} if not rest:
            layout, codes = "mxfp8", "weight"
        case {"weight": "F8_E4M3", "weight_scale": "U8", **rest} if not rest:
            layout, codes = "mxfp8", "weight"
        case {"weight": "F8_E4M3", "weight_scale": "F32", **rest} if not rest:
            layout, codes = "ptpc_fp8", "weight"
        case {"weight": "U8", "weight_scale": "U8", **rest} if not rest:
            layout, codes = "mxfp4", "weight"
        case {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32", **rest} if not rest:
            layout, codes = "nvfp4 modelopt", "weight"
        case {
            "weight_packed": "U8",
            "weight_scale": "F8_E4M3",
            "weight_global_scale": "F32",
            **rest,
        } if not rest:
            layout, codes = "nvfp4 compressed-tensors", "weight_packed"
        case _:
            entry = next(iter(parts.values()))
            got = ", ".join(f"{suffix} {e.dtype}" for suffix, e in parts.items())
            raise CheckpointError(
                f"{entry.file}: {prefix}: expected bf16, mxfp8, mxfp4, nvfp4 or ptpc_fp8, got {got}"
            )
    stored = parts[codes]
    if len(stored.shape) != 2:
        raise CheckpointError(f"{stored}: expected two dimensions, got {list(stored.shape)}")
    n, k = stored.shape
    if layout.startswith(("mxfp4", "nvfp4")):
        k *= 2
    found = Found(prefix, layout, (n, k), dict(parts))
    _check_scales(found)
    return found


def read(found: Found, tensors: Mapping[str, Tensor]) -> Matrix:
    """The matrix made of its tensors, given by suffix; CheckpointError for a scale that cannot be meant."""
    parts = found.parts
    if found.layout == "bf16":
        return Bf16(tensors["weight"])
    if found.layout == "ptpc_fp8":
        _check_positive(parts["weight_scale"], tensors["weight_scale"])
        return PtpcFp8(tensors["weight"], tensors["weight_scale"].flatten())
    if found.format in ("mxfp8", "mxfp4"):
        suffix = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
        scale = tensors[suffix]
        if count := int((scale == e8m0.NAN).sum()):
            raise CheckpointError(f"{parts[suffix]}: expected E8M0 bytes below 255 (NaN), got {count} of it")
        return (Mxfp8 if found.format == "mxfp8" else Mxfp4)(tensors["weight"], scale)
    scale = tensors["weight_scale"]
    if count := int((scale.float() < 0).sum()):
        raise CheckpointError(f"{parts['weight_scale']}: expected no negative scale, got {count}")
    modelopt = found.layout == "nvfp4 modelopt"
    suffix = "weight_scale_2" if modelopt else "weight_global_scale"
    _check_positive(parts[suffix], tensors[suffix])
    return Nvfp4(
        tensors["weight" if modelopt else "weight_packed"],
        scale,
        tensors[suffix].reshape(()),
        "modelopt" if modelopt else "compressed-tensors",
    )


def _check_scales(found: Found) -> None:
    n, k = found.shape
    if found.layout == "bf16":
        return
    group = {"mxfp4": mxfp4.GROUP, "mxfp8": mxfp8.GROUP, "nvfp4": nvfp4.GROUP}
    for suffix, entry in found.parts.items():
        allowed: tuple[tuple[int, ...], ...]
        if suffix in ("weight", "weight_packed"):
            continue
        if suffix in ("weight_scale_2", "weight_global_scale"):
            allowed = ((), (1,))
        elif found.layout == "ptpc_fp8":
            allowed = ((n,), (n, 1))
        elif k % group[found.format]:
            raise CheckpointError(
                f"{found}: expected K to be a multiple of {group[found.format]} in {found.format}, got {k}"
            )
        else:
            allowed = ((n, k // group[found.format]),)
        if entry.shape not in allowed:
            expected = " or ".join(str(list(shape)) for shape in allowed)
            raise CheckpointError(
                f"{entry}: expected {expected} for {found.format} [{n}, {k}], got {list(entry.shape)}"
            )


def _check_positive(entry: Entry, scale: Tensor) -> None:
    # a NaN compares false, so it is counted too
    if count := int((~(scale > 0)).sum() + torch.isinf(scale).sum()):
        raise CheckpointError(
            f"{entry}: expected finite positive scales, got {count} other of {scale.numel()}"
        )
