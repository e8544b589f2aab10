"""PTPC FP8: e4m3 with one fp32 scale per token for activations and per output channel for weights."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mono.formats import e4m3
from mono.formats.checks import check_dimensions, check_dtype, check_finite, check_same_device, check_shape
from mono.formats.stored import Stored

SMALLEST_WEIGHT_SCALE = 1e-30


@dataclass(frozen=True, slots=True, eq=False)
class PtpcFp8(Stored):
    """A weight in e4m3, one scale per output channel.

    values:  float8_e4m3fn [..., N, K].
    scale:   fp32 [..., N].
    Value:   values[n, k] * scale[n].
    Errors:  ValueError, naming the field, for another dtype, shape, or two devices.
    """

    format_name: ClassVar[str] = "ptpc_fp8"

    values: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        check_dtype("ptpc_fp8: values", self.values, torch.float8_e4m3fn)
        check_dtype("ptpc_fp8: scale", self.scale, torch.float32)
        check_dimensions("ptpc_fp8: values", self.values, 1)
        check_shape("ptpc_fp8: scale", self.scale, self.values.shape[:-1], "one scale per output channel")
        check_same_device("ptpc_fp8", (self.values, self.scale))

    @property
    def shape(self) -> torch.Size:
        """[..., N, K]."""
        return self.values.shape

    def dequantise(self) -> Tensor:
        """fp32 [..., N, K], one rounding: the product of code and scale."""
        return e4m3.decode(self.values) * self.scale.unsqueeze(-1)


def quantise_weight(w: Tensor) -> PtpcFp8:
    """One scale per output channel.

        scale[n] = max(max_k |w[n, k]| / 448, 1e-30)
        values[n, k] = e4m3(w[n, k] / scale[n])

    The maximum runs over the K given. A row-parallel weight is quantised whole and cut afterwards: a rank
    that quantises its own shard gets other scales and other values.

    Shapes:    w any float [..., N, K].
    Rounding:  scale and quotient in fp32 by true division, then to nearest even.
    Errors:    ValueError, with the count, if w holds a NaN or an infinity.
    """
    check_dimensions("ptpc_fp8: weight", w, 1)
    check_finite("ptpc_fp8: weight", w)
    w32 = w.float()
    scale = e4m3.over_max(w32.abs().amax(dim=-1)).clamp(min=SMALLEST_WEIGHT_SCALE)
    return PtpcFp8(e4m3.encode(w32 / scale.unsqueeze(-1)), scale)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations: one dynamic scale per token row.

        scale[t] = max_k |x[t, k]| / 448        1.0 for a row of zeros
        x8[t, k] = e4m3(x[t, k] / scale[t])

    Shapes:    x any float [T, K]. Returns x8 float8_e4m3fn [T, K] and scale fp32 [T].
    Rounding:  scale and quotient in fp32 by true division, then to nearest even, saturating.
    Errors:    none, and no wait for the device. A NaN or an infinity makes its row NaN, and no other.
    """
    return e4m3.quantise(x)
