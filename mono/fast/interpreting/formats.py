"""Numbers as the interpreter holds them: numpy arrays, with bit patterns for the types that numpy lacks."""

import functools
from typing import Any, TypeAlias

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

_FP8 = {  # Triton's name: torch's type, fraction bits, bias, largest value, NaN code
    "fp8e4nv": (torch.float8_e4m3fn, 3, 7, 448.0, 0x7F),
    "fp8e4b8": (torch.float8_e4m3fnuz, 3, 8, 240.0, 0x80),
    "fp8e5": (torch.float8_e5m2, 2, 15, 57344.0, 0x7F),
    "fp8e5b16": (torch.float8_e5m2fnuz, 2, 16, 57344.0, 0x80),
}
SMALL = frozenset(("bf16", *_FP8))  # held as bit patterns
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

_NUMPY = {
    "int1": np.dtype(np.bool_),
    **{
        name: np.dtype(name)
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    "bf16": np.dtype(np.uint16),
    **dict.fromkeys((*_FP8, "fp8e4b15"), np.dtype(np.uint8)),
}


def np_dtype(ty: Any) -> np.dtype[Any]:
    """The numpy type that holds a Triton type; pointers are uint64."""
    scalar = ty.scalar
    found = _NUMPY.get(scalar.name)
    if found is None:
        if not scalar.is_ptr():
            raise TypeError(f"the interpreter has no type {ty}")
        found = np.dtype(np.uint64)
    return found


@functools.cache
def _fp8_values(name: str) -> Array:
    """The 256 values of an fp8 type, in fp32."""
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(_FP8[name][0]).float().numpy()


def _round_to_fp8(x: Array, name: str) -> Array:
    """Any float -> fp8 codes by the definition: nearest even on the type's grid, saturated, NaN kept."""
    _, fraction, bias, largest, nan_code = _FP8[name]
    grid = _fp8_values(name)[:128].astype(np.float64)
    grid = grid[: int(np.nonzero(grid == largest)[0][0]) + 1]
    is_nan = np.isnan(x)
    size = np.where(is_nan, 0.0, np.minimum(np.abs(x.astype(np.float64)), largest))
    exponent = np.maximum(np.frexp(size)[1] - 1, 1 - bias)
    rounded = np.ldexp(np.rint(np.ldexp(size, fraction - exponent)), exponent - fraction)
    code = np.searchsorted(grid, np.minimum(rounded, largest)).astype(np.uint8)
    negative = np.signbit(x) & ((code != 0) | (nan_code != 0x80))  # the fnuz types have no minus zero
    return np.asarray(np.where(is_nan, np.uint8(nan_code), code | (negative.astype(np.uint8) << np.uint8(7))))


@functools.cache
def _fp8_codes(name: str) -> Array:
    """fp8 code of each of the 65536 bf16 bit patterns."""
    return _round_to_fp8(decode(np.arange(65536, dtype=np.uint16), tl.bfloat16), name)


def decode(x: Array, ty: Any) -> Array:
    """Bit patterns of a small float type -> fp32; any other type as it is."""
    name = ty.name
    if name not in SMALL:
        return x
    if name == "bf16":
        return np.left_shift(x, np.uint32(16), dtype=np.uint32).view(np.float32)
    return _fp8_values(name).take(x)


def encode(x: Array, ty: Any, toward_zero: bool = False) -> Array:
    """Numbers -> what holds the type, rounded to nearest even; fp8 saturates, NaN stays NaN."""
    name = ty.name
    if name not in SMALL:
        return x.astype(np_dtype(ty))
    if name == "bf16":
        u = np.asarray(x, np.float32).view(np.uint32)
        rounded = u if toward_zero else u + (((u >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
        out = (rounded >> np.uint32(16)).astype(np.uint16)
        is_nan = np.isnan(x)
        return np.where(is_nan, np.uint16(0x7FFF), out) if is_nan.any() else out
    if x.dtype == np.float64:
        return _round_to_fp8(x, name)
    # bf16 has at least three bits more than any fp8 type, so its last bit can stand for all below it
    u = np.asarray(x, np.float32).view(np.uint32)
    sticky = (u & np.uint32(0xFFFF)) != 0
    codes: Array = _fp8_codes(name).take((u >> np.uint32(16)) | sticky)
    return codes


def convert(x: Array, src: Any, dst: Any, toward_zero: bool = False) -> Array:
    """From one Triton type to another."""
    return x if src.name == dst.name and x.dtype != np.bool_ else encode(decode(x, src), dst, toward_zero)
