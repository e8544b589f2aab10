"""The released sizes add up, and a loaded model means what its checkpoint says, in every stored format."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from checkpoint.make import (
    EXPERTS,
    LAYOUTS,
    LM,
    STACKS,
    VOCAB,
    VOCAB_PADDED,
    Made,
    bf16_twin,
    make,
    released_config,
    values,
)
from torch import Tensor

from mono import decode
from mono.assembly import Assembly, assemble
from mono.caches import LayerCache
from mono.checkpoint import CheckpointError, load_checkpoint
from mono.deployment import Deployment
from mono.dspark import empty_caches
from mono.formats import Bf16, Nvfp4, PtpcFp8, mxfp4, ptpc_fp8
from mono.layers import LAYER_TYPES, dense_mlp, moe
from mono.models import Model, load_model, minimax_m3
from mono.models.minimax_m3 import Config
from mono.plan import Plan
from mono.reference.ops.rope import rope_table
from mono.step import Step

TINY = Path(__file__).parents[2] / "audit" / "tiny"
DEFAULT = Deployment(max_context=128)
AS_STORED = Deployment(
    linears="checkpoint", shared_expert="apart", expert_activations="bf16", max_context=128
)

# sizes of the released checkpoints


def released_plan(stack: str) -> Plan:
    return minimax_m3.plan_of(Config.of(released_config(stack)), AS_STORED, "bf16")


@pytest.mark.parametrize(("stack", "total"), [("m3", 426_174_572_928), ("m3.1", 426_186_370_176)])
def test_parameters_of_the_text_decoder(stack: str, total: int) -> None:
    plan = released_plan(stack)
    plain, matrices = minimax_m3.tensor_shapes(plan)
    assert sum(math.prod(shape) for shape in [*plain.values(), *matrices.values()]) == total

    # the layer contracts, which pack these tensors, count the same
    in_contracts = sum(
        math.prod(shape)
        for slot in plan.slots
        for name, shape in LAYER_TYPES[slot.kind].shapes(slot.spec).items()
        if shape is not None and name != "rope"
    )
    assert in_contracts == total


def test_parameters_by_stored_format() -> None:
    _, matrices = minimax_m3.tensor_shapes(released_plan("m3.1"))
    routed = sum(math.prod(shape) for prefix, shape in matrices.items() if ".experts." in prefix)
    assert routed == 413_122_166_784
    # attention, index projections, shared experts and dense MLPs: what the release stores as MXFP8
    assert sum(math.prod(shape) for shape in matrices.values()) - routed == 10_560_208_896


def test_tensors_of_the_bf16_text_decoder() -> None:
    plain, matrices = minimax_m3.tensor_shapes(released_plan("m3"))
    outside, norms_and_attention, indexer, dense, experts = 3, 8, 4, 3, 3 * 128 + 3 + 2
    assert len(plain) + len(matrices) == (
        outside + 60 * norms_and_attention + 57 * indexer + 3 * dense + 57 * experts
    )
    assert len(plain) + len(matrices) == 22_893
    layer = f"{LM}model.layers.3."
    assert matrices[f"{layer}self_attn.q_proj"] == (8192, 6144)
    assert matrices[f"{layer}self_attn.index_k_proj"] == (128, 6144)
    assert matrices[f"{layer}block_sparse_moe.experts.127.w2"] == (6144, 3072)
    assert matrices[f"{LM}model.layers.2.mlp.down_proj"] == (6144, 12288)
    assert plain[f"{layer}block_sparse_moe.gate.weight"] == (128, 6144)
    assert f"{LM}model.layers.2.self_attn.index_q_proj" not in matrices


@pytest.mark.parametrize("stack", STACKS)
def test_the_plan_of_the_released_model(stack: str) -> None:
    plan = released_plan(stack)
    assert len(plan.slots) == 122
    assert plan.prefix == 3
    assert plan.keys_before_selection == 16 * 128
    attention = [slot.kind for slot in plan.slots[1:-1:2]]
    assert attention.count("dense_attention") == (3 if stack == "m3" else 0)
    assert attention[3:] == ["sparse_attention"] * 57
    qkv = LAYER_TYPES["sparse_attention"].shapes(plan.slots[7].spec)["qkv"]
    assert qkv == (9856, 6144)


# what is loaded


def load(made: Made, folder: Path, deployment: Deployment) -> Model:
    return load_model(made.write(folder), deployment)


def built(model: Model) -> Assembly:
    assembly = assemble(model.plan, model.weights, model.deployment, "reference")
    assert isinstance(assembly, Assembly), assembly
    return assembly


def decoded(model: Model, prompt: int = 30, more: int = 4) -> tuple[Tensor, list[int]]:
    """Logits of every row and the tokens decoded greedily after a prompt longer than a selection reaches."""
    assembly, config = built(model), model.config
    blocks = -(-(prompt + more) // config.block_size)
    caches = [
        LayerCache.empty(
            blocks,
            config.block_size,
            config.kv_heads,
            config.head_dim,
            config.index_dim if config.sparse[layer] else None,
        )
        for layer in range(config.layers)
    ]
    tables = torch.arange(blocks, dtype=torch.int32).flip(0)[None]
    tokens = (torch.arange(prompt)[None] * 7) % config.vocab
    logits, emitted, length = [], [], 0
    for _ in range(1 + more):
        length += tokens.shape[1]
        step = Step.of(tokens, torch.tensor([length], dtype=torch.int32), tables, config.block_size)
        out = decode.run(assembly, step, caches)
        logits.append(out.logits)
        emitted.append(int(out.top1[-1]))
        tokens = out.top1[-1:][None]
    return torch.cat(logits), emitted


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "bf16"])
def test_every_format_decodes_as_the_bf16_checkpoint_of_its_values(
    tmp_path: Path, stack: str, layout: str
) -> None:
    """Weights kept as stored, bf16 activations: the products are of the same values, so logits are equal."""
    made = make(stack, layout)
    got, emitted = decoded(load(made, tmp_path / "stored", AS_STORED))
    want, _ = decoded(load(bf16_twin(made), tmp_path / "bf16", AS_STORED))
    assert torch.equal(got, want)
    assert want.isfinite().all()
    assert want.std() > 0.1
    assert all(0 <= token < VOCAB for token in emitted)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "quark, shared too"])
def test_quantised_linears_depend_on_values_alone(tmp_path: Path, layout: str) -> None:
    """PTPC linears made from a stored format equal those made from the BF16 checkpoint of its values."""
    made = make("m3.1", layout)
    deployment = replace(AS_STORED, linears="ptpc_fp8")
    got, _ = decoded(load(made, tmp_path / "stored", deployment))
    want, _ = decoded(load(bf16_twin(made), tmp_path / "bf16", deployment))
    kept, _ = decoded(load_model(tmp_path / "stored", AS_STORED))
    assert torch.equal(got, want)
    assert not torch.equal(got, kept)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_format_decodes_in_the_default_deployment(tmp_path: Path, stack: str, layout: str) -> None:
    """PTPC linears, MXFP8 activations, and a shared expert that is fused where the table is MXFP4."""
    model = load(make(stack, layout), tmp_path / "c", DEFAULT)
    shared = {slot.spec.shared for slot in model.plan.slots if isinstance(slot.spec, moe.Spec)}
    assert shared == {"fused" if layout.startswith("quark") else "apart"}
    logits, emitted = decoded(model)
    assert logits.isfinite().all()
    assert logits.std() > 0.1
    assert all(0 <= token < VOCAB for token in emitted)


def test_a_fused_shared_expert_decodes_as_one_stored_in_mxfp4(tmp_path: Path) -> None:
    made = make("m3", "quark")
    fused, _ = decoded(load(made, tmp_path / "mxfp8", DEFAULT))
    for prefix, matrix in made.matrices.items():
        if ".shared_experts." in prefix:
            del made.tensors[f"{prefix}.weight_scale_inv"]
            four_bit = mxfp4.quantise(values(matrix))
            made.tensors |= {f"{prefix}.weight": four_bit.packed, f"{prefix}.weight_scale": four_bit.scale}
    made.config["quantization_config"]["exclude"].pop()  # the shared experts
    stored, _ = decoded(load(made, tmp_path / "mxfp4", DEFAULT))
    assert torch.equal(fused, stored)


def slot_weights(model: Model, kind: str) -> tuple[int, object]:
    """Decoder layer and weights of the first slot of a kind."""
    at = [slot.kind for slot in model.plan.slots].index(kind)
    return model.plan.slots[at].layer, model.weights[at]


@pytest.mark.parametrize("layout", ["bf16", "mxfp8"])
def test_ptpc_is_the_quantised_meaning_of_the_stored_matrix(tmp_path: Path, layout: str) -> None:
    made = make("m3.1", layout)
    model = load(made, tmp_path / "c", DEFAULT)
    layer, attention = slot_weights(model, "sparse_attention")
    at = f"{LM}model.layers.{layer}."
    check_ptpc(attention.o, made, [f"{at}self_attn.o_proj"])
    packed = ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj")
    check_ptpc(attention.qkv, made, [f"{at}self_attn.{name}" for name in packed])
    _, mlp = slot_weights(model, "dense_mlp")
    check_ptpc(mlp.gate_up, made, [f"{at}mlp.gate_proj", f"{at}mlp.up_proj"])
    check_ptpc(mlp.down, made, [f"{at}mlp.down_proj"])


def check_ptpc(got: object, made: Made, prefixes: list[str]) -> None:
    want = ptpc_fp8.quantise_weight(torch.cat([values(made.matrices[prefix]) for prefix in prefixes]))
    assert isinstance(got, PtpcFp8)
    assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(got.scale, want.scale)


@pytest.mark.parametrize("layout", ["quark", "quark, shared too"])
def test_the_fused_shared_expert_is_the_last_of_the_table(tmp_path: Path, layout: str) -> None:
    made = make("m3", layout)
    layer, experts = slot_weights(load(made, tmp_path / "c", DEFAULT), "moe")
    at = f"{LM}model.layers.{layer}.block_sparse_moe."
    assert experts.shared_gate_up is None
    assert experts.gate_up.shape[0] == experts.down.shape[0] == EXPERTS + 1
    # MXFP4 of an MXFP4 matrix's values is that matrix only if nothing saturated, so it must not be redone
    shared = {
        name: matrix
        if isinstance(matrix := made.matrices[f"{at}shared_experts.{name}"], mxfp4.Mxfp4)
        else mxfp4.quantise(matrix.dequantise())
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    half = shared["gate_proj"].shape[0]
    for got, want in (
        (experts.gate_up[EXPERTS].rows(0, half), shared["gate_proj"]),
        (experts.gate_up[EXPERTS].rows(half, 2 * half), shared["up_proj"]),
        (experts.down[EXPERTS], shared["down_proj"]),
    ):
        assert torch.equal(got.packed, want.packed)
        assert torch.equal(got.scale, want.scale)
    for e in range(EXPERTS):
        w1, w2, w3 = (made.matrices[f"{at}experts.{e}.{name}"] for name in ("w1", "w2", "w3"))
        assert torch.equal(experts.gate_up[e].packed, torch.cat([w1.packed, w3.packed]))
        assert torch.equal(experts.gate_up[e].scale, torch.cat([w1.scale, w3.scale]))
        assert torch.equal(experts.down[e].packed, w2.packed)


@pytest.mark.parametrize("layout", ["release", "modelopt"])
def test_nvfp4_keeps_the_two_global_scales_of_an_expert(tmp_path: Path, layout: str) -> None:
    made = make("m3.1", layout)
    layer, experts = slot_weights(load(made, tmp_path / "c", DEFAULT), "moe")
    at = f"{LM}model.layers.{layer}.block_sparse_moe.experts."
    assert isinstance(experts.gate_up, Nvfp4)
    assert isinstance(experts.down, Nvfp4)
    pairs = [(made.matrices[f"{at}{e}.w1"], made.matrices[f"{at}{e}.w3"]) for e in range(EXPERTS)]
    assert any(w1.global_scale != w3.global_scale for w1, w3 in pairs)
    for e, (w1, w3) in enumerate(pairs):
        assert torch.equal(experts.gate_up[e].dequantise(), torch.cat([w1.dequantise(), w3.dequantise()]))
        assert torch.equal(experts.down[e].dequantise(), made.matrices[f"{at}{e}.w2"].dequantise())
    assert experts.gate_up.global_scale.shape == (EXPERTS, 2 * pairs[0][0].shape[0])
    assert experts.down.global_scale.shape == (EXPERTS,)


def test_a_bf16_checkpoint_stays_bf16(tmp_path: Path) -> None:
    made = make("m3", "bf16")
    model = load(made, tmp_path / "c", AS_STORED)
    layer, experts = slot_weights(model, "moe")
    _, attention = slot_weights(model, "dense_attention")
    _, mlp = slot_weights(model, "dense_mlp")
    matrices = (experts.gate_up, experts.down, experts.shared_gate_up, experts.shared_down)
    for matrix in (*matrices, attention.qkv, attention.o, mlp.gate_up, mlp.down):
        assert isinstance(matrix, Bf16)
    shared = f"{LM}model.layers.{layer}.block_sparse_moe.shared_experts."
    gate, up, down = (made.matrices[f"{shared}{name}"] for name in ("gate_proj", "up_proj", "down_proj"))
    assert torch.equal(experts.shared_gate_up.values, torch.cat([gate, up]))
    assert torch.equal(experts.shared_down.values, down)


def test_aliases_of_expert_names_load_the_same(tmp_path: Path) -> None:
    made = make("m3.1", "quark")
    plain = load(made, tmp_path / "plain", DEFAULT)
    for old, new in ((".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj.")):
        made.tensors = {name.replace(old, new): tensor for name, tensor in made.tensors.items()}
    made.tensors = {f"model.{name}": tensor for name, tensor in made.tensors.items()}
    aliased = load(made, tmp_path / "aliased", DEFAULT)
    assert torch.equal(decoded(plain)[0], decoded(aliased)[0])


def test_the_rope_table_is_one_and_shared(tmp_path: Path) -> None:
    made = make("m3", "quark")
    model = load(made, tmp_path / "c", DEFAULT)
    tables = [w.rope for w in model.weights if hasattr(w, "rope")]
    assert len({table.data_ptr() for table in tables}) == 1
    assert torch.equal(tables[0], rope_table(128, 8, 5e6))
    assert load_model(model.checkpoint, replace(DEFAULT, max_context=256)).weights[1].rope.shape == (256, 8)


def test_no_context_beyond_what_the_model_was_made_for(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"deployment\.max_context: expected at most max_position_embeddings = 256, got 257"
    ):
        load(make(), tmp_path / "c", replace(DEFAULT, max_context=257))


def test_what_goes_wrong_in_a_step_names_its_layer(tmp_path: Path) -> None:
    model = load(make("m3", "quark"), tmp_path / "c", DEFAULT)
    caches = empty_caches(model.plan, 4)
    caches[2] = replace(caches[2], index_k=None)
    step = Step.of(
        torch.zeros(1, 1).long(), torch.tensor([1]).int(), torch.zeros(1, 1).int(), model.config.block_size
    )
    with pytest.raises(
        ValueError,
        match=r"^layer 2 \(sparse_attention\): .*cache\.index_k: expected \[4, 8, 16\], got nothing$",
    ):
        decode.run(built(model), step, caches)


def test_nothing_is_assembled_for_a_longer_context_or_another_group(tmp_path: Path) -> None:
    model = load(make("m3.1", "quark"), tmp_path / "c", DEFAULT)
    with pytest.raises(
        ValueError, match=r"layer 0 \(sparse_attention\): rope: expected .* = 129 positions, got 128"
    ):
        assemble(model.plan, model.weights, replace(DEFAULT, max_context=129), "reference")
    for side in ("reference", "fast"):
        two = assemble(model.plan, model.weights, replace(DEFAULT, tp_size=2), side)
        assert str(two) == "tp_size is 2, the group has 1 rank"


def test_the_vocabulary_is_what_the_configuration_says(tmp_path: Path) -> None:
    model = load(make(), tmp_path / "c", DEFAULT)
    for slot in (model.plan.slots[0], model.plan.slots[-1]):
        assert (slot.spec.vocab, slot.spec.vocab_padded) == (VOCAB, VOCAB_PADDED)


def test_a_bf16_router_is_widened(tmp_path: Path) -> None:
    made = make()
    plain = load(made, tmp_path / "plain", DEFAULT)
    for name in made.tensors:
        if name.endswith(("moe.gate.weight", "correction_bias")):
            assert torch.equal(made.tensors[name], made.tensors[name].bfloat16().float())
            made.tensors[name] = made.tensors[name].bfloat16()
    widened = load(made, tmp_path / "bf16", DEFAULT)
    assert slot_weights(widened, "moe")[1].router.dtype == torch.float32
    assert torch.equal(decoded(plain)[0], decoded(widened)[0])


def test_a_model_without_a_shared_expert(tmp_path: Path) -> None:
    made = make()
    made.config["text_config"]["n_shared_experts"] = 0
    made.tensors = {name: t for name, t in made.tensors.items() if "shared_experts" not in name}
    model = load(made, tmp_path / "c", DEFAULT)
    assert {slot.spec.shared for slot in model.plan.slots if isinstance(slot.spec, moe.Spec)} == {"none"}
    assert decoded(model)[0].isfinite().all()


def test_reuse_of_a_selection_decodes(tmp_path: Path) -> None:
    made = make("m3.1", "quark")
    every = decoded(load(made, tmp_path / "every", DEFAULT))[0]
    made.config |= {"use_index_cache": True, "index_topk_freq": 2}
    model = load(made, tmp_path / "second", DEFAULT)
    assert model.plan.selecting == (0, 2)
    assert not torch.equal(decoded(model)[0], every)


def test_the_bytes_do_not_depend_on_the_device(tmp_path: Path, device: torch.device) -> None:
    folder = make("m3", "quark").write(tmp_path / "c")
    here, there = load_model(folder, DEFAULT), load_model(folder, DEFAULT, device)
    for ours, theirs in zip(here.weights, there.weights, strict=True):
        for field in fields(ours):
            pairs = zip(parts(getattr(ours, field.name)), parts(getattr(theirs, field.name)), strict=True)
            for a, b in pairs:
                assert b.device.type == device.type
                assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))


def parts(value: object) -> list[Tensor]:
    if value is None or isinstance(value, Tensor):
        return [] if value is None else [value]
    return [x for f in fields(value) if isinstance(x := getattr(value, f.name), Tensor)]


# what a checkpoint of this model can be wrong about

LAYER = f"{LM}model.layers.2."
Q = f"{LAYER}self_attn.q_proj"
W1 = f"{LAYER}block_sparse_moe.experts.1.w1"


def drop(*names: str) -> Callable[[Made], None]:
    def apply(made: Made) -> None:
        for name in names:
            del made.tensors[name]

    return apply


def change(name: str, to: Callable[[Tensor], Tensor]) -> Callable[[Made], None]:
    def apply(made: Made) -> None:
        made.tensors[name] = to(made.tensors[name])

    return apply


def add(name: str, tensor: Tensor) -> Callable[[Made], None]:
    def apply(made: Made) -> None:
        assert name not in made.tensors
        made.tensors[name] = tensor

    return apply


def spoilt(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[-1] = float("nan")
    return changed


def store_as(prefix: str, layout: str) -> Callable[[Made], None]:
    """Store one matrix as another layout does."""

    def apply(made: Made) -> None:
        for name in [name for name in made.tensors if name.startswith(f"{prefix}.")]:
            del made.tensors[name]
        other = make("m3.1", layout).tensors
        made.tensors |= {name: t for name, t in other.items() if name.startswith(f"{prefix}.")}

    return apply


ERRORS = [
    ("quark", drop(f"{LM}model.norm.weight"), rf"{LM}model.norm.weight: missing$"),
    ("quark", drop(f"{LM}lm_head.weight"), r"lm_head.weight: missing$"),
    ("quark", drop(f"{Q}.weight", f"{Q}.weight_scale_inv"), r"q_proj.weight: missing$"),
    ("quark", drop(f"{W1}.weight_scale"), r"experts.1.w1: expected bf16, .*got weight U8$"),
    ("quark", drop(f"{LAYER}self_attn.index_k_norm.weight"), r"index_k_norm.weight: missing$"),
    (
        "quark",
        add(f"{LAYER}self_attn.index_v_proj.weight", torch.zeros(1)),
        r"index_v_proj\S+ unknown tensor in",
    ),
    (
        "quark",
        add(f"{LM}model.layers.9.mlp.up_proj.weight", torch.zeros(1)),
        r"layers.9.\S+ unknown tensor in",
    ),
    ("quark", add(f"{LAYER}self_attn.q_proj.bias", torch.zeros(64)), r"q_proj.bias: unknown tensor in"),
    (
        "quark",
        change(f"{LM}model.norm.weight", lambda t: t[:63]),
        r"model.norm.weight: expected BF16 \[64\], got BF16 \[63\]$",
    ),
    ("quark", change(f"{LM}model.norm.weight", torch.Tensor.float), r"expected BF16 \[64\], got F32 \[64\]$"),
    (
        "quark",
        change(f"{LAYER}block_sparse_moe.gate.weight", torch.Tensor.half),
        r"gate.weight: expected F32 or BF16 \[4, 64\], got F16 \[4, 64\]$",
    ),
    (
        "bf16",
        change(f"{Q}.weight", lambda t: t[:63]),
        r"q_proj.weight: expected \[64, 64\], got \[63, 64\] in",
    ),
    (
        "bf16",
        change(f"{W1}.weight", lambda t: t.T),
        r"w1.weight: expected \[32, 64\], got \[64, 32\] in bf16$",
    ),
    (
        "quark",
        change(f"{LM}model.embed_tokens.weight", lambda t: t[:59]),
        r"embed_tokens.weight: expected at least 60 rows, as many in both tables, got 59$",
    ),
    (
        "quark",
        change(f"{LM}lm_head.weight", lambda t: t[:60]),
        r"lm_head.weight: expected at least 60 rows, as many in both tables, got 60$",
    ),
    ("quark", change(f"{LM}lm_head.weight", spoilt), r"lm_head.weight: expected finite values, got 1 NaN"),
    ("quark", change(f"{LAYER}input_layernorm.weight", spoilt), r"input_layernorm.weight: expected finite"),
    (
        "quark",
        change(f"{LAYER}block_sparse_moe.e_score_correction_bias", spoilt),
        r"e_score_correction_bias: expected finite",
    ),
    ("quark", store_as(W1, "mxfp8"), r"w1.weight: expected mxfp4, as the first routed expert, got mxfp8$"),
    (
        "mxfp8",
        change(f"{Q}.weight_scale_inv", lambda t: torch.full_like(t, 254)),
        r"q_proj.weight: expected values within fp32, got infinite ones$",
    ),
]


@pytest.mark.parametrize(("layout", "spoil", "message"), ERRORS)
def test_a_wrong_checkpoint_is_named(
    tmp_path: Path, layout: str, spoil: Callable[[Made], None], message: str
) -> None:
    made = make("m3.1", layout)
    spoil(made)
    folder = made.write(tmp_path / "c")
    with pytest.raises(CheckpointError, match=message) as raised:
        load_model(folder, DEFAULT)
    assert "\n" not in str(raised.value)
    assert str(folder) in str(raised.value)


def test_the_vision_tower_is_skipped(tmp_path: Path) -> None:
    made = make()
    for part in ("vision_tower.blocks.0.weight", "multi_modal_projector.a", "model.patch_merge_mlp.b"):
        made.tensors[part] = torch.full((3,), float("nan"))
    assert decoded(load(made, tmp_path / "c", DEFAULT))[0].isfinite().all()


@pytest.mark.parametrize("layout", ["quark", "modelopt"])
def test_a_four_bit_matrix_is_not_quantised_again(tmp_path: Path, layout: str) -> None:
    made = make("m3.1", layout)
    donor = W1 if layout == "quark" else f"{LAYER}block_sparse_moe.experts.0.w3"
    o_proj = f"{LM}model.layers.0.mlp.gate_proj"
    for name in [name for name in made.tensors if name.startswith(f"{o_proj}.")]:
        del made.tensors[name]
    # 32 rows thrice: the dense MLP's 96
    for suffix in ("weight", "weight_scale"):
        made.tensors[f"{o_proj}.{suffix}"] = made.tensors[f"{donor}.{suffix}"].repeat(3, 1)
    if layout == "modelopt":
        made.tensors[f"{o_proj}.weight_scale_2"] = made.tensors[f"{donor}.weight_scale_2"]
    else:
        made.config["quantization_config"]["exclude"] = []
    folder = made.write(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"gate_proj.weight: .* a 4-bit matrix is not quantised again$"):
        load_model(folder, DEFAULT)
    with pytest.raises(CheckpointError, match=r"up_proj.weight: expected .*fp4.*, as gate_proj, got mxfp8$"):
        load_model(folder, AS_STORED)


def test_a_fused_shared_expert_has_the_routed_width() -> None:
    config = released_config("m3")
    config["text_config"]["shared_intermediate_size"] = 6144
    with pytest.raises(ValueError, match="a fused shared expert has the routed width 3072, got 6144"):
        minimax_m3.plan_of(Config.of(config), Deployment(), "mxfp4")
    plan = minimax_m3.plan_of(Config.of(config), AS_STORED, "mxfp4")
    assert isinstance(spec := plan.slots[8].spec, moe.Spec)
    assert spec.shared_intermediate == 6144


def test_fewer_vocabulary_rows_than_tokens_is_no_plan() -> None:
    config = Config.of(released_config("m3"))
    with pytest.raises(ValueError, match="expected at least 200064 vocabulary rows, got 200063"):
        minimax_m3.plan_of(config, Deployment(), "mxfp4", 200063)


def test_a_dense_mlp_has_its_own_width() -> None:
    spec = released_plan("m3").slots[2].spec
    assert isinstance(spec, dense_mlp.Spec)
    assert spec.intermediate == 12288


def test_an_open_checkpoint_loads_as_its_folder_does(tmp_path: Path) -> None:
    folder = make().write(tmp_path / "c")
    by_path, by_object = load_model(folder, DEFAULT), load_model(load_checkpoint(folder), DEFAULT)
    assert by_path.plan == by_object.plan
    assert torch.equal(decoded(by_path)[0], decoded(by_object)[0])


@pytest.mark.parametrize("stack", STACKS)
def test_the_embedded_checkpoints_load(stack: str) -> None:
    """They are trained and stored by other code than this file's maker."""
    model = load_model(TINY / stack, replace(DEFAULT, max_context=2048))
    assert [slot.kind for slot in model.plan.slots].count("dense_attention") == (3 if stack == "m3" else 0)
    assert {slot.spec.shared for slot in model.plan.slots if isinstance(slot.spec, moe.Spec)} == {"fused"}
    assert decoded(model, prompt=100)[0].isfinite().all()
    assert model.checkpoint.drafter() is not None
