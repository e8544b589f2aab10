"""The meaning of stored bytes.

    format     module    codes                scales                           value
    ---------  --------  -------------------  -------------------------------  ---------------------------
    bf16       bf16      bf16 [N, K]          none                             itself
    ptpc_fp8   ptpc_fp8  e4m3 [N, K]          fp32 [N]                         e4m3 * scale
    mxfp8      mxfp8     e4m3 [N, K]          E8M0 uint8 [N, K/32]             e4m3 * 2^(scale - 127)
    mxfp4      mxfp4     e2m1 uint8 [N, K/2]  E8M0 uint8 [N, K/32]             e2m1 * 2^(scale - 127)
    nvfp4      nvfp4     e2m1 uint8 [N, K/2]  e4m3 [N, K/16], fp32 per matrix  e2m1 * scale, / or * global
    KV cache   kv_fp8    e4m3 [..., D]        fp32 [...], index keys none      e4m3 * scale

All may have leading dimensions: a table of experts is one matrix [E, N, K], and `table[e]` one expert of it.
Packed codes hold the even k in the low nibble. The element types are in `e4m3`, `e8m0` and `e2m1`.

Weight quantisers raise on a value that is not finite: a weight must be. Activation quantisers
(`quantise_rows`, `quantise_heads`, `mxfp8.quantise`) do not look, since that would wait for the device within
a step; there a NaN stays a NaN: in its whole row or head through the scale, in MXFP8 in its own place.
"""

from mono.formats.bf16 import Bf16
from mono.formats.checks import check_finite
from mono.formats.mxfp4 import Mxfp4
from mono.formats.mxfp8 import Mxfp8
from mono.formats.nvfp4 import Nvfp4
from mono.formats.ptpc_fp8 import PtpcFp8

Matrix = Bf16 | PtpcFp8 | Mxfp8 | Mxfp4 | Nvfp4

__all__ = ["Bf16", "Matrix", "Mxfp4", "Mxfp8", "Nvfp4", "PtpcFp8", "check_finite"]
