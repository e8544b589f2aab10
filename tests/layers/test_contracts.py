"""What both arms of a layer type ask of its spec, its weights and its cache, before anything runs."""

from dataclasses import replace

import pytest
import torch
from attention_layers import random_carry, random_weights
from paged import launching, paged

from mono.caches import LayerCache
from mono.fast import ARMS as FAST
from mono.formats import Bf16
from mono.layers import LAYER_TYPES, dense_attention, embed, head, moe, sparse_attention
from mono.parallel import SOLO
from mono.reference import ARMS as REFERENCE

SPARSE = sparse_attention.Spec(
    hidden=32, heads=4, kv_heads=2, head_dim=16, rotary_dim=16, eps=1e-6, block_size=16, index_dim=16,
    topk_blocks=4, init_blocks=0, local_blocks=1, selects=True,
)  # fmt: skip
DENSE = dense_attention.Spec(32, 4, 2, 16, 16, 1e-6, 16)
BOTH = [("dense_attention", DENSE), ("sparse_attention", SPARSE)]
both_arms = pytest.mark.parametrize("arms", [REFERENCE, FAST], ids=["reference", "fast"])


@pytest.mark.parametrize("layer_type", LAYER_TYPES.values(), ids=lambda t: t.name)
def test_every_field_has_a_cut_and_plain_ones_a_dtype(layer_type) -> None:
    fields = layer_type.weights.__dataclass_fields__
    assert list(layer_type.cuts) == list(fields)
    plain = [name for name, field in fields.items() if field.type == "Tensor"]
    assert list(layer_type.dtypes) == plain


@both_arms
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("norm", lambda x: x.float(), "norm: expected torch.bfloat16, got torch.float32"),
        ("k_norm", lambda x: x.half(), "k_norm: expected torch.bfloat16, got torch.float16"),
        ("rope", lambda x: x.double(), "rope: expected torch.float32, got torch.float64"),
        ("q_norm", Bf16, "q_norm: expected torch.bfloat16, got a stored matrix"),
        ("o", lambda m: m.dequantise(), "o: expected a stored matrix, got torch.float32"),
    ],
)
@pytest.mark.parametrize(("kind", "spec"), BOTH, ids=["dense", "sparse"])
def test_a_weight_of_another_kind_is_named_at_build(arms, kind, spec, name, change, message) -> None:
    weights = random_weights(LAYER_TYPES[kind], spec)
    wrong = replace(weights, **{name: change(getattr(weights, name))})
    with pytest.raises(ValueError, match=f"^{kind}.{message}$"):
        arms[kind].build(spec, wrong, SOLO)


@both_arms
@pytest.mark.parametrize(("kind", "spec"), BOTH, ids=["dense", "sparse"])
@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"kv_heads": 1}, r"k: expected \[8, 16, 2, 16\], got \[8, 16, 1, 16\]"),
        ({"head_dim": 32}, r"k: expected \[8, 16, 2, 16\], got \[8, 16, 2, 32\]"),
        ({"block_size": 32}, r"k: expected \[8, 16, 2, 16\], got \[8, 32, 2, 16\]"),
    ],
)
def test_a_cache_of_other_sizes_is_named_and_left_alone(arms, kind, spec, size, message) -> None:
    _, step = paged([20], heads=2)
    sizes = {"kv_heads": 2, "head_dim": 16, "block_size": 16} | size
    cache = LayerCache.empty(8, **sizes, index_dim=16)
    before = cache.clone()
    layer = arms[kind].build(spec, random_weights(LAYER_TYPES[kind], spec), SOLO)
    with launching(torch.device("cpu")), pytest.raises(ValueError, match=rf"^{kind}: cache\.{message}$"):
        layer(random_carry(spec, step.rows), step, cache)
    for name in ("k", "v", "k_scale", "v_scale", "index_k"):
        now, then = getattr(cache, name), getattr(before, name)
        assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))


@both_arms
def test_a_selecting_layer_needs_index_keys_and_a_reusing_one_none(arms) -> None:
    cache, step = paged([20], heads=2)
    weights = random_weights(LAYER_TYPES["sparse_attention"], SPARSE)
    carry = replace(random_carry(SPARSE, 1), selected=torch.tensor([[[0, 1, -1, -1]] * 2], dtype=torch.int32))
    without = replace(cache, index_k=None)
    with launching(torch.device("cpu")):
        with pytest.raises(ValueError, match=r"cache\.index_k: expected \[5, 16, 16\], got nothing"):
            arms["sparse_attention"].build(SPARSE, weights, SOLO)(carry, step, without)
        reuses = arms["sparse_attention"].build(replace(SPARSE, selects=False), weights, SOLO)
        assert reuses(carry, step, without).partial.isfinite().all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda: replace(DENSE, heads=3), "dense_attention: expected heads a multiple of 2, got 3"),
        (lambda: replace(SPARSE, heads=3), "sparse_attention: expected heads a multiple of 2, got 3"),
        (lambda: embed.Spec(32, 9, 8), "embed: expected vocab from 1 to 8 rows, got 9"),
        (lambda: head.Spec(32, 0, 8, 1e-6), "head: expected vocab from 1 to 8 rows, got 0"),
        (
            lambda: moe.Spec(32, 32, 4, 5, 1.0, 1e-6, 1.7, 1.0, 7.0, "mxfp4", "mxfp8", "none", 0),
            "moe: expected topk from 1 to 4 experts, got 5",
        ),
    ],
)
def test_sizes_that_contradict_each_other_are_no_spec(spec, message) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        spec()
