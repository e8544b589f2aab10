"""MiniMax-M3 and M3.1: plan, tensor names, weights.

M3's first layers have full attention, M3.1's are sparse like the rest. Nothing asks which of the two it is:
the layer lists of the configuration tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mono.checkpoint import Checkpoint, CheckpointError
from mono.checkpoint.names import is_text
from mono.checkpoint.stored import SUFFIXES, UNREAD
from mono.deployment import Deployment, Linears
from mono.formats import Matrix, Mxfp4, Nvfp4, PtpcFp8, mxfp4, ptpc_fp8
from mono.layers import AnySpec, AnyWeights, dense_attention, dense_mlp, embed, head, moe, sparse_attention
from mono.models.minimax_m3_config import Config
from mono.models.packing import rows_of, table_of
from mono.plan import Plan, Slot
from mono.reference.ops.rope import rope_table

__all__ = [
    "ARCHITECTURES",
    "Config",
    "check_tensors",
    "load_weights",
    "plan_of",
    "stored_as",
    "tensor_shapes",
]

ARCHITECTURES = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")

EMBED = "language_model.model.embed_tokens.weight"
NORM = "language_model.model.norm.weight"
HEAD = "language_model.lm_head.weight"


def plan_of(
    config: Config, deployment: Deployment, routed_format: str, vocab_padded: int | None = None
) -> Plan:
    """The model as slots.

    routed_format:  format the routed experts are stored in (`stored_as`).
    vocab_padded:   rows of the embedding and head tables; the true vocabulary if None.

    The shared expert is fused only into an MXFP4 table, as wide as itself: with routed experts in another
    format the plan keeps it apart, whatever the deployment asks, and the fast arm refuses that table.
    Errors:  ValueError if fewer rows than tokens are stored, or a fused expert has another width.
    """
    vocab_padded = config.vocab if vocab_padded is None else vocab_padded
    if vocab_padded < config.vocab:
        raise ValueError(f"plan: expected at least {config.vocab} vocabulary rows, got {vocab_padded}")
    shared: Literal["fused", "apart", "none"] = "apart" if config.shared_experts else "none"
    if shared == "apart" and deployment.shared_expert == "fused" and routed_format == "mxfp4":
        if config.shared_intermediate != config.intermediate:
            raise ValueError(
                f"plan: a fused shared expert has the routed width {config.intermediate}, "
                f"got {config.shared_intermediate}"
            )
        shared = "fused"

    attention: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "eps", "block_size")
    }
    indexer = {
        name: getattr(config, name) for name in ("index_dim", "topk_blocks", "init_blocks", "local_blocks")
    }
    mlp = {name: getattr(config, name) for name in ("hidden", "eps", "alpha", "beta", "limit")}
    dense_spec = dense_mlp.Spec(intermediate=config.dense_intermediate, **mlp)
    moe_spec = moe.Spec(
        intermediate=config.intermediate,
        experts=config.experts,
        topk=config.topk,
        scaling=config.scaling,
        routed_format=routed_format,
        activations=deployment.expert_activations,
        shared=shared,
        shared_intermediate=config.shared_intermediate,
        **mlp,
    )

    def slots() -> Iterator[Slot]:
        yield Slot(-1, "embed", embed.Spec(config.hidden, config.vocab, vocab_padded))
        for layer in range(config.layers):
            if config.sparse[layer]:
                selects = config.selects[layer]
                yield Slot(
                    layer, "sparse_attention", sparse_attention.Spec(**attention, **indexer, selects=selects)
                )
            else:
                yield Slot(layer, "dense_attention", dense_attention.Spec(**attention))
            if config.moe[layer]:
                yield Slot(layer, "moe", moe_spec)
            else:
                yield Slot(layer, "dense_mlp", dense_spec)
        yield Slot(config.layers, "head", head.Spec(config.hidden, config.vocab, vocab_padded, config.eps))

    return Plan(tuple(slots()))


def tensor_shapes(plan: Plan) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """What a checkpoint of this plan holds: shapes of plain tensors by name, and of matrices by prefix.

    A matrix is `prefix.weight` in bf16, and that with scales, or another suffix, in other formats.
    """
    plain: dict[str, tuple[int, ...]] = {}
    matrices: dict[str, tuple[int, ...]] = {}
    for slot in plan.slots:
        _shapes_of_slot(_at(slot.layer), slot.spec, plain, matrices)
    return plain, matrices


def _at(layer: int) -> str:
    return f"language_model.model.layers.{layer}."


def _shapes_of_slot(
    at: str, spec: AnySpec, plain: dict[str, tuple[int, ...]], matrices: dict[str, tuple[int, ...]]
) -> None:
    H = spec.hidden
    match spec:
        case embed.Spec():
            plain[EMBED] = (spec.vocab_padded, H)
        case head.Spec():
            plain[NORM] = (H,)
            plain[HEAD] = (spec.vocab_padded, H)
        case dense_attention.Spec() | sparse_attention.Spec():
            N, G, D = spec.heads, spec.kv_heads, spec.head_dim
            plain[f"{at}input_layernorm.weight"] = (H,)
            plain[f"{at}self_attn.q_norm.weight"] = plain[f"{at}self_attn.k_norm.weight"] = (D,)
            matrices[f"{at}self_attn.q_proj"] = (N * D, H)
            matrices[f"{at}self_attn.k_proj"] = matrices[f"{at}self_attn.v_proj"] = (G * D, H)
            matrices[f"{at}self_attn.o_proj"] = (H, N * D)
            if isinstance(spec, sparse_attention.Spec):
                index = spec.index_dim
                plain[f"{at}self_attn.index_q_norm.weight"] = (index,)
                plain[f"{at}self_attn.index_k_norm.weight"] = (index,)
                matrices[f"{at}self_attn.index_q_proj"] = (G * index, H)
                matrices[f"{at}self_attn.index_k_proj"] = (index, H)
        case dense_mlp.Spec():
            plain[f"{at}post_attention_layernorm.weight"] = (H,)
            matrices[f"{at}mlp.gate_proj"] = matrices[f"{at}mlp.up_proj"] = (spec.intermediate, H)
            matrices[f"{at}mlp.down_proj"] = (H, spec.intermediate)
        case moe.Spec():
            plain[f"{at}post_attention_layernorm.weight"] = (H,)
            plain[f"{at}block_sparse_moe.gate.weight"] = (spec.experts, H)
            plain[f"{at}block_sparse_moe.e_score_correction_bias"] = (spec.experts,)
            for e in range(spec.experts):
                expert = f"{at}block_sparse_moe.experts.{e}"
                matrices[f"{expert}.w1"] = matrices[f"{expert}.w3"] = (spec.intermediate, H)
                matrices[f"{expert}.w2"] = (H, spec.intermediate)
            if spec.shared != "none":
                expert, width = f"{at}block_sparse_moe.shared_experts", spec.shared_intermediate
                matrices[f"{expert}.gate_proj"] = matrices[f"{expert}.up_proj"] = (width, H)
                matrices[f"{expert}.down_proj"] = (H, width)


def stored_as(checkpoint: Checkpoint, config: Config) -> tuple[str, int]:
    """Format of the routed experts (bf16 without any), and rows of the vocabulary tables; from headers alone.

    Errors:  CheckpointError if the tables are missing, hold fewer rows than there are tokens, or differ.
    """
    rows = {name: checkpoint.entry(name).shape[:1] for name in (EMBED, HEAD)}
    for name, (count,) in rows.items():
        if count < config.vocab or count != rows[EMBED][0]:
            expected = f"at least {config.vocab} rows, as many in both tables"
            raise CheckpointError(f"{checkpoint.entry(name)}: expected {expected}, got {count}")
    first = next((layer for layer, is_moe in enumerate(config.moe) if is_moe), None)
    if first is None:
        return "bf16", rows[EMBED][0]
    return checkpoint.find(f"{_at(first)}block_sparse_moe.experts.0.w1").format, rows[EMBED][0]


def check_tensors(checkpoint: Checkpoint, plan: Plan) -> None:
    """CheckpointError naming the first tensor that is missing, mis-shaped, of another type, or unknown.

    Plain tensors are bf16; router weights and biases fp32, or bf16, which is widened exactly. All routed
    experts have the plan's format. From the headers alone.
    """
    plain, matrices = tensor_shapes(plan)
    known = set(plain)
    for name, shape in plain.items():
        entry = checkpoint.entry(name)
        router = name.endswith(("block_sparse_moe.gate.weight", "e_score_correction_bias"))
        dtypes = ("F32", "BF16") if router else ("BF16",)
        if entry.shape != shape or entry.dtype not in dtypes:
            expected = f"{' or '.join(dtypes)} {list(shape)}"
            raise CheckpointError(f"{entry}: expected {expected}, got {entry.dtype} {list(entry.shape)}")
    routed = next((slot.spec.routed_format for slot in plan.slots if isinstance(slot.spec, moe.Spec)), None)
    for prefix, shape in matrices.items():
        found = checkpoint.find(prefix)
        if found.shape != shape:
            raise CheckpointError(
                f"{found}: expected {list(shape)}, got {list(found.shape)} in {found.format}"
            )
        if ".experts." in prefix and found.format != routed:
            raise CheckpointError(
                f"{found}: expected {routed}, as the first routed expert, got {found.format}"
            )
        known.update(f"{prefix}.{suffix}" for suffix in (*SUFFIXES, *UNREAD))
    for name in checkpoint.names:
        if name not in known and is_text(name):
            raise CheckpointError(f"{checkpoint.entry(name)}: unknown tensor in the text decoder")


def load_weights(
    checkpoint: Checkpoint,
    config: Config,
    plan: Plan,
    deployment: Deployment,
    device: torch.device | str = "cpu",
) -> tuple[AnyWeights, ...]:
    """One Weights per slot of `plan`, whole matrices: tensor-parallel ranks cut them afterwards.

    Packing:     q | k | v (| index q | index k), gate | up and w1 | w3 become the rows of one matrix; experts
                 one table. NVFP4 matrices of several global scales keep them, one per row: no value changes.
    Quantising:  with `linears="ptpc_fp8"`, attention and dense-MLP matrices of bf16 or MXFP8 become PTPC
                 FP8 over their whole K, from their exact values; 4-bit ones are refused, PTPC ones stay. A
                 fused shared expert becomes MXFP4 by the rule "even", unless it is that already. All on the
                 CPU, so the bytes do not depend on `device`.
    RoPE table:  one for all layers, of deployment.max_context positions.
    Errors:      CheckpointError as `check_tensors` and `Checkpoint.matrix`; a 4-bit matrix to be quantised,
                 one whose values exceed fp32, and matrices of one packed product in different formats.
                 ValueError for a longer context than max_position_embeddings.
    """
    check_tensors(checkpoint, plan)
    if deployment.max_context > config.max_positions:
        raise ValueError(
            f"deployment.max_context: expected at most max_position_embeddings = {config.max_positions},"
            f" got {deployment.max_context}"
        )
    rope = rope_table(deployment.max_context, config.rotary_dim, config.rope_theta).to(device)
    load = _Load(checkpoint, deployment.linears, torch.device(device), rope)
    return tuple(load.slot(_at(slot.layer), slot.spec) for slot in plan.slots)


@dataclass(frozen=True, slots=True)
class _Load:
    """Reads the tensors of a slot and lays them out on `device`."""

    checkpoint: Checkpoint
    linears: Linears
    device: torch.device
    rope: Tensor

    def slot(self, at: str, spec: AnySpec) -> AnyWeights:
        match spec:
            case embed.Spec():
                return embed.Weights(self.plain(EMBED))
            case head.Spec():
                return head.Weights(self.plain(NORM), self.plain(HEAD))
            case dense_attention.Spec():
                return dense_attention.Weights(
                    norm=self.plain(f"{at}input_layernorm.weight"),
                    qkv=self.linear(f"{at}self_attn.", "q_proj", "k_proj", "v_proj"),
                    q_norm=self.plain(f"{at}self_attn.q_norm.weight"),
                    k_norm=self.plain(f"{at}self_attn.k_norm.weight"),
                    o=self.linear(f"{at}self_attn.", "o_proj"),
                    rope=self.rope,
                )
            case sparse_attention.Spec():
                packed = ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj")
                return sparse_attention.Weights(
                    norm=self.plain(f"{at}input_layernorm.weight"),
                    qkv=self.linear(f"{at}self_attn.", *packed),
                    q_norm=self.plain(f"{at}self_attn.q_norm.weight"),
                    k_norm=self.plain(f"{at}self_attn.k_norm.weight"),
                    index_q_norm=self.plain(f"{at}self_attn.index_q_norm.weight"),
                    index_k_norm=self.plain(f"{at}self_attn.index_k_norm.weight"),
                    o=self.linear(f"{at}self_attn.", "o_proj"),
                    rope=self.rope,
                )
            case dense_mlp.Spec():
                return dense_mlp.Weights(
                    norm=self.plain(f"{at}post_attention_layernorm.weight"),
                    gate_up=self.linear(f"{at}mlp.", "gate_proj", "up_proj"),
                    down=self.linear(f"{at}mlp.", "down_proj"),
                )
            case moe.Spec():
                return self.experts(at, spec)

    def experts(self, at: str, spec: moe.Spec) -> moe.Weights:
        """Routed experts as a table, with the shared one behind them if it is fused, or beside them."""
        block = f"{at}block_sparse_moe."
        routed = range(spec.experts)
        gate_up = [self.packed(f"{block}experts.{e}.", "w1", "w3") for e in routed]
        down = [self.packed(f"{block}experts.{e}.", "w2") for e in routed]
        shared_gate_up = shared_down = None
        if spec.shared == "fused":
            gate_up.append(
                rows_of([self.mxfp4(f"{block}shared_experts.{p}") for p in ("gate_proj", "up_proj")])
            )
            down.append(self.mxfp4(f"{block}shared_experts.down_proj"))
        elif spec.shared == "apart":
            shared_gate_up = self.packed(f"{block}shared_experts.", "gate_proj", "up_proj").to(self.device)
            shared_down = self.packed(f"{block}shared_experts.", "down_proj").to(self.device)
        return moe.Weights(
            norm=self.plain(f"{at}post_attention_layernorm.weight"),
            router=self.plain(f"{block}gate.weight").float(),
            bias=self.plain(f"{block}e_score_correction_bias").float(),
            gate_up=table_of(gate_up).to(self.device),
            down=table_of(down).to(self.device),
            shared_gate_up=shared_gate_up,
            shared_down=shared_down,
        )

    def plain(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name).to(self.device)

    def linear(self, at: str, *names: str) -> Matrix:
        """Rows of several attention or dense-MLP matrices, in the format the deployment serves them in."""
        if self.linears == "checkpoint":
            return self.packed(at, *names).to(self.device)
        return rows_of([self.ptpc(f"{at}{name}") for name in names]).to(self.device)

    def packed(self, at: str, *names: str) -> Matrix:
        """Rows of several matrices, as they are stored."""
        first = self.checkpoint.find(f"{at}{names[0]}")
        for name in names[1:]:
            found = self.checkpoint.find(f"{at}{name}")
            if found.layout != first.layout:
                raise CheckpointError(f"{found}: expected {first.layout}, as {names[0]}, got {found.layout}")
        return rows_of([self.checkpoint.matrix(f"{at}{name}") for name in names])

    def ptpc(self, prefix: str) -> PtpcFp8:
        matrix = self.checkpoint.matrix(prefix)
        if isinstance(matrix, PtpcFp8):
            return matrix
        if isinstance(matrix, Mxfp4 | Nvfp4):
            raise CheckpointError(
                f"{self.checkpoint.find(prefix)}: expected bf16, mxfp8 or ptpc_fp8 to serve as ptpc_fp8, "
                f"got {matrix.format_name}: a 4-bit matrix is not quantised again"
            )
        return ptpc_fp8.quantise_weight(self.exact(prefix, matrix))

    def mxfp4(self, prefix: str) -> Mxfp4:
        matrix = self.checkpoint.matrix(prefix)
        if isinstance(matrix, Mxfp4):
            return matrix
        if isinstance(matrix, Nvfp4):
            raise CheckpointError(
                f"{self.checkpoint.find(prefix)}: expected bf16, mxfp8, mxfp4 or ptpc_fp8 to fuse as mxfp4, "
                f"got {matrix.format_name}: a 4-bit matrix is not quantised again"
            )
        return mxfp4.quantise(self.exact(prefix, matrix))

    def exact(self, prefix: str, matrix: Matrix) -> Tensor:
        values = matrix.dequantise()
        if not bool(values.isfinite().all()):
            raise CheckpointError(
                f"{self.checkpoint.find(prefix)}: expected values within fp32, got infinite ones"
            )
        return values
