"""Numeric helpers that every kernel shares: rounding, small formats, the order of floats.

Each is a `@triton.jit` function that inlines into its caller. Plain and fused kernels call the same ones, so
a test of one is a test of both. They touch no memory: formats are decoded by bit arithmetic.

Widening needs no helper: `.to(tl.float32)`, `.to(tl.bfloat16)` and `.to(tl.float16)` of an e4m3 value are
exact. An e4m3 buffer that came as bytes is read with `.to(tl.float8e4nv, bitcast=True)`.
"""

# mypy: disable-error-code="no-untyped-def"
# device functions take Triton's tensors, which have no static types

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def to_bf16(x):
    """fp32 -> bf16, round to nearest, ties to even. NaN stays NaN, overflow becomes infinity."""
    return x.to(tl.bfloat16)


@triton.jit
def true_div(a, b):
    """`a / b` in fp32, rounded to nearest even. Plain `/` is an approximation on NVIDIA, up to 2 ulp off."""
    return tl.div_rn(a, b)


@triton.jit
def quantise_e4m3(x):
    """fp32 -> e4m3, round to nearest even, saturating at +-448. NaN stays NaN.

    The clamp is explicit because targets differ above 464, and passes NaN on because a plain `tl.clamp` turns
    it into a finite value.
    """
    return tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def abs_max(x, axis: tl.constexpr):
    """Largest magnitude of fp32 `x` along `axis`; NaN if there is one, whatever stands beside it.

    Magnitudes order as their bits do, NaN above infinity, while a float maximum drops NaN on most hardware.
    """
    return tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=axis).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_scale(amax):
    """fp32 scale of PTPC FP8 and of the FP8 KV cache: `amax / 448` by true division, 1.0 where that is zero.

    Divide by it (`quantise_e4m3(true_div(x, scale))`): the product with a reciprocal rounds differently.
    """
    scale = tl.div_rn(amax, 448.0)
    return tl.where(scale == 0.0, 1.0, scale)  # so has a small subnormal amax


@triton.jit
def quantise_row(x):
    """fp32 rows [T, K] -> e4m3 codes [T, K] and fp32 scales [T]: the row's amax / 448, 1.0 for a zero row."""
    scale = e4m3_scale(abs_max(x, 1))
    return quantise_e4m3(true_div(x, tl.broadcast_to(scale[:, None], x.shape))), scale


@triton.jit
def decode_e8m0(code):
    """E8M0 scale bytes (uint8) -> fp32 `2^(code - 127)`, exact; 0 is the subnormal 2^-127, 255 is NaN."""
    e = code.to(tl.int32)
    bits = tl.where(e == 0, 0x00400000, tl.where(e == 255, 0x7FC00000, e << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def mxfp8_scale(amax):
    """E8M0 code (uint8) of an MXFP8 scale block from its fp32 `amax >= 0`.

        code = ceil(log2(amax / 448)) + 127, clamped to [1, 254]

    Exact, from the bits: 448 is 1.75 * 2^8, so the ceiling steps where the significand passes 1.75.
    448 -> 127, 449 -> 128, 1.0 -> 119, 0 -> 1. Infinity and NaN give 254. The block is then
    `quantise_e4m3(x * decode_e8m0(254 - code))`, since 2^(127 - code) is the scale of code 254 - code.
    """
    bits = amax.to(tl.int32, bitcast=True)
    code = ((bits + 0x1FFFFF) >> 23) - 8  # carries when the fraction exceeds 0x600000, 1.75
    code = tl.where(bits >= 0x7F800000, 254, tl.maximum(code, 1))
    return code.to(tl.uint8)


@triton.jit
def round_mxfp8(x, axis: tl.constexpr):
    """fp32 x -> the values of its MXFP8 form, exact in bf16. `axis`, 32 long, lies under one scale."""
    code = tl.expand_dims(mxfp8_scale(abs_max(x, axis)), axis)
    codes = quantise_e4m3(x * decode_e8m0(254 - code))
    return to_bf16(codes.to(tl.float32) * decode_e8m0(code))


@triton.jit
def decode_mxfp4(packed, scale):
    """Packed codes [M, K/2] and E8M0 bytes [M, K/32] -> the values of even and of odd k, each bf16 [M, K/2].

    A code has two significant bits, so its product with a power of two is exact in bf16, subnormals included.
    Both nibbles of a byte move at once: `s ee m` at bits 15 and 8..6 is, read as bf16, the code's value times
    2^-126, 0 and 0.5 included, and a bf16 in the upper half of a word is the same number in fp32.
    """
    M: tl.constexpr = packed.shape[0]
    G: tl.constexpr = scale.shape[1]
    byte = packed.to(tl.int32)
    word = byte | (byte << 12)  # even k at bits 0..3, odd k at bits 16..19
    word = ((word & 0x00070007) << 6) | ((word & 0x00080008) << 12)
    even = (word << 16).to(tl.float32, bitcast=True)
    odd = (word & -0x10000).to(tl.float32, bitcast=True)
    factor = decode_e8m0(scale)[:, :, None]  # [M, G, 1]
    even = (even * 2.0**126).reshape(M, G, 16) * factor
    odd = (odd * 2.0**126).reshape(M, G, 16) * factor
    return to_bf16(even).reshape(M, G * 16), to_bf16(odd).reshape(M, G * 16)


@triton.jit
def swiglu_oai(gate, up, alpha, beta, limit):
    """Clamped SwiGLU in fp32.

        g * sigmoid(alpha * g) * (u + beta),    g = min(gate, limit),  u = clamp(up, -limit, limit)

    NaN passes through. The sigmoid's exponential and division are the hardware's approximations, a few ulp of
    fp32 from exact.
    """
    g = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    u = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return g * tl.sigmoid(alpha * g) * (u + beta)


@triton.jit
def rank_key(x, index):
    """fp32 values and their int32 indices >= 0 -> int64 keys: the largest key is the best value's.

    NaN ranks above every number, the two zeros are equal, and of equal values the lower index wins. So
    choosing is one integer maximum, which has no order, instead of an argmax with rules of its own.
    """
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(x != x, 0x7FFFFFFF, ordered)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def key_index(key):
    """The int32 index in a `rank_key`."""
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


NO_KEY = tl.constexpr(-(2**63))  # below the key of every value
