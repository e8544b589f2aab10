"""A linear layer over whatever format its matrix is stored in."""

from __future__ import annotations

from torch import Tensor

from mono.deployment import Activations
from mono.formats import Bf16, Matrix, PtpcFp8, e4m3, mxfp8, ptpc_fp8
from mono.reference.numerics import NATIVE, Numerics


def linear(
    x: Tensor,
    matrix: Matrix,
    numerics: Numerics = NATIVE,
    activations: Activations = "bf16",
) -> Tensor:
    """y = x W^T, the row rounded as W's format asks.

    Shapes:    x [T, K] fp32 or bf16; W [N, K]. Returns [T, N] fp32, not rounded.
    Rounding:  PTPC FP8: x to e4m3 with one fp32 scale a row (amax / 448, from x as given), products
               of the stored codes summed, then times the row's scale, then the channel's.
               MXFP4, MXFP8, NVFP4: x to bf16, then to MXFP8 if `activations` says so; products of
               the decoded values summed.  BF16: x to bf16, products summed.
    """
    if isinstance(matrix, PtpcFp8):
        x8, scale = ptpc_fp8.quantise_rows(x)
        return numerics.matmul(e4m3.decode(x8), e4m3.decode(matrix.values)) * scale[:, None] * matrix.scale
    return numerics.matmul(rounded(x, matrix, activations), matrix.dequantise())


def rounded(x: Tensor, matrix: Matrix, activations: Activations) -> Tensor:
    """Rows as a product with an unscaled or MX matrix takes them: bf16, then MXFP8 if asked for; as fp32."""
    x = x.bfloat16()
    if activations == "mxfp8" and not isinstance(matrix, Bf16):
        return mxfp8.quantise(x).dequantise()
    return x.float()
