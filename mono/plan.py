"""A model as an ordered list of slots, and the rules that need the whole list."""

from __future__ import annotations

from dataclasses import dataclass

from mono.layers import LAYER_TYPES, AnySpec, sparse_attention


@dataclass(frozen=True, slots=True)
class Slot:
    """One layer type at one decoder layer.

    layer: decoder layer; -1 for the embedding, the number of decoder layers for the head.
    kind:  name of the layer type.
    """

    layer: int
    kind: str
    spec: AnySpec

    def __post_init__(self) -> None:
        if self.kind not in LAYER_TYPES:
            raise ValueError(f"slot: unknown layer type {self.kind!r}, known are {sorted(LAYER_TYPES)}")
        if type(self.spec) is not LAYER_TYPES[self.kind].spec:
            raise ValueError(f"{self}: expected a spec of its own type, got {type(self.spec).__module__}")

    def __str__(self) -> str:
        return self.kind if self.kind in ("embed", "head") else f"layer {self.layer} ({self.kind})"


@dataclass(frozen=True, slots=True)
class Plan:
    """All slots of a model, in order: embed, two per decoder layer, head."""

    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        kinds = [slot.kind for slot in self.slots]
        body = self.slots[1:-1]
        if len(kinds) < 4 or kinds[0] != "embed" or kinds[-1] != "head" or len(body) % 2:
            raise ValueError(f"plan: expected embed, two slots per decoder layer, head; got {kinds}")
        for i, slot in enumerate(body):
            wanted = ("dense_attention", "sparse_attention") if i % 2 == 0 else ("dense_mlp", "moe")
            if slot.layer != i // 2 or slot.kind not in wanted:
                raise ValueError(f"plan: expected one of {wanted} at layer {i // 2}, got {slot}")
        if self.slots[0].layer != -1 or self.slots[-1].layer != self.layers:
            raise ValueError("plan: the embedding is layer -1 and the head follows the last decoder layer")

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return (len(self.slots) - 2) // 2

    @property
    def prefix(self) -> int:
        """Decoder layers before the first MoE layer; all of them if there is none."""
        return next((slot.layer for slot in self.slots if slot.kind == "moe"), self.layers)

    @property
    def selecting(self) -> tuple[int, ...]:
        """Decoder layers whose indexer picks KV blocks."""
        return tuple(
            s.layer for s in self.slots if isinstance(s.spec, sparse_attention.Spec) and s.spec.selects
        )

    @property
    def keys_before_selection(self) -> int:
        """Keys a context must exceed before a selection drops any; 0 without sparse layers."""
        sizes = [
            s.spec.topk_blocks * s.spec.block_size
            for s in self.slots
            if isinstance(s.spec, sparse_attention.Spec)
        ]
        return max(sizes, default=0)
