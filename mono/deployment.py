"""Everything outside the checkpoint that changes numerics or kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Linears = Literal["ptpc_fp8", "checkpoint"]
Activations = Literal["mxfp8", "bf16"]
SharedExpert = Literal["fused", "apart"]
KvFormat = Literal["fp8_e4m3", "bf16"]
Prefix = Literal["reference", "fast"]
Verify = Literal["fixed", "confidence", "ragged", "off"]


@dataclass(frozen=True, slots=True)
class Deployment:
    """How a checkpoint is served.

    tp_size:             tensor-parallel ranks.
    linears:             format of attention and dense linears: `ptpc_fp8` quantises them at load,
                         `checkpoint` keeps what is stored.
    expert_activations:  `mxfp8` (e4m3, an E8M0 scale for 32: the family's definition) or `bf16`.
    shared_expert:       `fused` requantises the shared expert to MXFP4 as expert number E;
                         `apart` keeps it as the checkpoint stores it.
    kv_format:           format of the K/V and index caches: `fp8_e4m3` or `bf16`.
    max_context:         longest context served, in tokens.
    verify, draft_len:   speculative verify mode and drafts per request.
    widths:              row counts that are built; a step runs at the smallest that holds it.
    prefix:              arm of a sparse dense-MLP prefix (M3.1's layers 0..2); a full-attention
                         prefix (M3's) is always fast.
    """

    tp_size: int = 1
    linears: Linears = "ptpc_fp8"
    expert_activations: Activations = "mxfp8"
    shared_expert: SharedExpert = "fused"
    kv_format: KvFormat = "fp8_e4m3"
    max_context: int = 1_048_576
    verify: Verify = "fixed"
    draft_len: int = 7
    widths: tuple[int, ...] = (8, 16)
    prefix: Prefix = "reference"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("linears", get_args(Linears)),
            ("expert_activations", get_args(Activations)),
            ("shared_expert", get_args(SharedExpert)),
            ("kv_format", get_args(KvFormat)),
            ("verify", get_args(Verify)),
            ("prefix", get_args(Prefix)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"deployment.{name}: expected one of {allowed}, got {getattr(self, name)!r}")
        for name, least in (("tp_size", 1), ("max_context", 1), ("draft_len", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"deployment.{name}: expected an integer of at least {least}, got {value!r}")
        counts = type(self.widths) is tuple and all(type(width) is int for width in self.widths)
        if not counts or not self.widths or sorted({0, *self.widths}) != [0, *self.widths]:
            raise ValueError(f"deployment.widths: expected ascending row counts, got {self.widths!r}")

    @property
    def q_len(self) -> int:
        """Rows per request in a step: the anchor and its drafts."""
        return 1 + (self.draft_len if self.verify != "off" else 0)
