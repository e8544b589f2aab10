"""What bind refuses, in which order, with which words; what a refusal leaves behind; what a Bound does."""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import checkpoint.make
import pytest
import torch
from binding.issuing import KEY, NOW, SERVED, TINY, certificate, embedded, evidence, facts
from checkpoint.make import LAYOUTS, make, released_config
from torch import Tensor

import mono
from mono import Deployment, Refused, binding, decode
from mono import certificate as certificates
from mono import facts as facts_module
from mono.assembly import Assembly, assemble
from mono.binding import Bound, bind, refuse_device, refuse_stack
from mono.certificate import Certificate, issue
from mono.dspark import empty_caches
from mono.fast.targets import SUPPORTED
from mono.models import Model, load_model, minimax_m3
from mono.plan import Plan
from mono.step import Step

NAMES = ("m3", "m3.1")


@pytest.fixture(scope="module")
def allowed() -> dict[str, Certificate]:
    return {name: certificate(facts(name)) for name in NAMES}


def reasons(result: Bound | Refused) -> tuple[str, ...]:
    assert isinstance(result, Refused)
    assert not result
    return result.reasons


# the layer stack, at the released sizes: nothing of it needs a weight


def plan_of(config: dict[str, Any], deployment: Deployment = SERVED) -> Plan:
    return minimax_m3.plan_of(minimax_m3.Config.of(config), deployment, "mxfp4")


def stack(name: str, **text: Any) -> Plan:
    config = released_config(name)
    config["text_config"] |= text
    return plan_of(config)


def with_kinds(plan: Plan, **kinds: int) -> Plan:
    """The plan with the spec and kind of slot `taken_from` at `at`, layer numbers kept."""
    slots = list(plan.slots)
    at, taken = slots[kinds["at"]], slots[kinds["taken_from"]]
    slots[kinds["at"]] = replace(at, kind=taken.kind, spec=taken.spec)
    return replace(plan, slots=tuple(slots))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prefix", ["reference", "fast"])
def test_both_released_stacks_fit(name: str, prefix: Any) -> None:
    assert refuse_stack(stack(name), replace(SERVED, prefix=prefix)) == []


@pytest.mark.parametrize("freq", [1, 2, 3, 4])
def test_a_reusing_first_fused_layer(freq: int) -> None:
    """M3.1 counts its sparse layers from 0, so layer 3 selects under 1 and 3; M3's layer 3 is number 0."""
    reuse = {"use_index_cache": True, "index_topk_freq": freq}
    assert refuse_stack(stack("m3", **reuse), SERVED) == []
    expected = (
        "layer 3: reuses a selection, and it is the first fused sparse layer, which must select its own KV"
        " blocks (index_topk_freq)"
    )
    assert refuse_stack(stack("m3.1", **reuse), SERVED) == ([expected] if freq in (2, 4) else [])
    # with the prefix fast, layer 0 is the first fused one
    assert refuse_stack(stack("m3.1", **reuse), replace(SERVED, prefix="fast")) == []


def test_a_mixed_prefix() -> None:
    mixed = with_kinds(stack("m3"), at=3, taken_from=7)
    assert refuse_stack(mixed, SERVED) == [
        "layer 1: a mixed prefix: expected dense_attention, as layer 0, got sparse_attention"
    ]
    m3 = stack("m3")
    slots = list(stack("m3.1").slots)
    slots[5] = m3.slots[5]
    assert refuse_stack(Plan(tuple(slots)), SERVED) == [
        "layer 2: a mixed prefix: expected sparse_attention, as layer 0, got dense_attention"
    ]


def test_an_moe_prefix() -> None:
    no_prefix = stack("m3.1", moe_layer_freq=[1] * 60)
    assert refuse_stack(no_prefix, SERVED) == [
        "layer 0: expected a dense-MLP prefix before the MoE layers, got moe"
    ]
    m3 = stack("m3", moe_layer_freq=[0, 1, *[1] * 58])
    assert refuse_stack(m3, SERVED) == [
        "layer 1: expected sparse_attention and moe, got dense_attention and moe",
        "layer 2: expected sparse_attention and moe, got dense_attention and moe",
    ]


def test_no_moe_layer_at_all() -> None:
    assert refuse_stack(stack("m3.1", moe_layer_freq=[0] * 60), SERVED) == [
        "layer 59: expected MoE layers after the dense-MLP prefix, there are none"
    ]


def test_a_dense_mlp_behind_the_prefix() -> None:
    assert refuse_stack(stack("m3.1", moe_layer_freq=[0] * 3 + [1, 0] + [1] * 55), SERVED) == [
        "layer 4: expected sparse_attention and moe, got sparse_attention and dense_mlp"
    ]


@pytest.mark.parametrize(("field", "value"), [("alpha", 1.5), ("beta", 0.5), ("limit", 6.0)])
def test_dense_layers_with_different_swiglu(field: str, value: float) -> None:
    def changed(plan: Plan) -> Plan:
        slots = list(plan.slots)
        slots[4] = replace(slots[4], spec=replace(slots[4].spec, **{field: value}))
        return Plan(tuple(slots))

    got = {"alpha": 1.702, "beta": 1.0, "limit": 7.0} | {field: value}
    expected = [
        "layer 1 (dense_mlp): expected SwiGLU (alpha, beta, limit) (1.702, 1.0, 7.0), as layer 0,"
        f" got ({got['alpha']}, {got['beta']}, {got['limit']})"
    ]
    assert refuse_stack(changed(stack("m3")), SERVED) == expected
    assert refuse_stack(changed(stack("m3.1")), replace(SERVED, prefix="fast")) == expected
    # a prefix on the original modules has no fused parameters to agree on
    assert refuse_stack(changed(stack("m3.1")), SERVED) == []


# a loaded model, layer by layer


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Model]:
    """Small checkpoints in the release's formats, three dense layers and two of experts."""
    monkeypatch.setattr(checkpoint.make, "DENSE", 3)
    monkeypatch.setattr(checkpoint.make, "LAYERS", 5)

    def load(layout: str, deployment: Deployment = SERVED) -> Model:
        made = make("m3.1", layout)
        made.config["text_config"]["sparse_attention_config"]["sparse_block_size"] = 16
        made.config["text_config"]["max_position_embeddings"] = 512
        return load_model(made.write(tmp_path / layout.replace(" ", "_")), deployment)

    return load


def test_nvfp4_experts_are_refused_at_layer_3(release: Callable[[str], Model]) -> None:
    expected = "layer 3 (moe): routed experts are nvfp4, the fused kernel reads mxfp4 (and 1 other slots)"
    assert reasons(bind(release("release"), SERVED, None)) == (expected,)
    assert reasons(bind(release("modelopt"), SERVED, None)) == (expected,)


@pytest.mark.parametrize("layout", ["bf16", "mxfp8"])
def test_experts_in_another_format_name_it(release: Callable[[str], Model], layout: str) -> None:
    assert "release" in LAYOUTS
    expected = f"layer 3 (moe): routed experts are {layout}, the fused kernel reads mxfp4 (and 1 other slots)"
    assert reasons(bind(release(layout), SERVED, None)) == (expected,)


def test_mxfp4_experts_get_as_far_as_the_certificate(release: Callable[[str], Model]) -> None:
    assert reasons(bind(release("quark"), SERVED, None))[0].startswith("certificate: none was given")


def test_a_shared_expert_that_is_not_in_the_table() -> None:
    """The deployment says fused and the plan was made otherwise."""
    apart = embedded("m3", replace(SERVED, shared_expert="apart"))
    assert reasons(bind(apart, SERVED, None)) == (
        "model: was loaded with shared_expert 'apart', the deployment has 'fused'",
        "layer 3 (moe): the shared expert is apart; deployment.shared_expert='fused' makes it one of the"
        " table (and 4 other slots)",
    )


def test_a_model_loaded_for_another_deployment() -> None:
    model = embedded("m3")
    assert reasons(bind(model, replace(SERVED, expert_activations="bf16"), None)) == (
        "model: was loaded with expert_activations 'mxfp8', the deployment has 'bf16'",
    )
    (reason,) = reasons(bind(model, replace(SERVED, max_context=1024), None))
    assert reason.startswith("layer 0 (dense_attention): rope: ")
    assert "1024" in reason
    assert "512" in reason


@pytest.mark.parametrize("taps", [(3, 1), (1, 1), (-2,), (8,)])
def test_taps_that_no_layer_has(taps: tuple[int, ...]) -> None:
    assert reasons(bind(embedded("m3"), SERVED, None, taps)) == (
        f"taps: expected strictly increasing ids from -1 to 7, got {list(taps)}",
    )


def test_another_device() -> None:
    assert reasons(bind(embedded("m3"), SERVED, None, device="cuda:0")) == (
        "device: expected the weights on cuda:0, they are on cpu",
    )
    assert reasons(bind(embedded("m3"), SERVED, None, device="cpu"))[0].startswith("certificate:")


@pytest.mark.parametrize(
    ("major", "minor", "name"), [(8, 0, "sm_80"), (9, 0, "sm_90"), (10, 0, "sm_100"), (12, 0, "sm_120")]
)
def test_a_gpu_that_no_kernel_is_built_for(
    monkeypatch: pytest.MonkeyPatch, major: int, minor: int, name: str
) -> None:
    properties = type("Properties", (), {"name": "A GPU", "major": major, "minor": minor})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    why = refuse_device(torch.device("cuda", 0))
    built = ", ".join(SUPPORTED)
    assert why == (None if name in SUPPORTED else f"device: A GPU ({name}): kernels are built for {built}")
    assert refuse_device(torch.device("cpu")) is None
    assert refuse_device(torch.device("meta")) == f"device: meta (unknown): kernels are built for {built}"


def changed_weights(model: Model, index: int, **changes: Any) -> Model:
    weights = list(model.weights)
    weights[index] = replace(weights[index], **changes)
    return replace(model, weights=tuple(weights))


def off_by(tensor: Tensor) -> Tensor:
    """The same values one element further, off their alignment."""
    moved = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    moved.copy_(tensor)
    return moved


def gaps(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def spoiled(scale: Tensor, value: float) -> Tensor:
    """The same scales, the last one another."""
    other = scale.clone()
    other.view(-1)[-1] = value
    return other


W = embedded("m3").weights
MOE = "layer 3 (moe)"
BAD_WEIGHTS: list[tuple[int, dict[str, Any], str]] = [
    (
        1,
        {"norm": W[1].norm.float()},
        "layer 0 (dense_attention): dense_attention.norm: expected torch.bfloat16, got torch.float32",
    ),
    (8, {"router": W[8].router.bfloat16()}, f"{MOE}: moe.router: expected torch.float32, got torch.bfloat16"),
    (8, {"bias": off_by(W[8].bias)}, f"{MOE}: bias: expected an address of whole 16 bytes"),
    (
        7,
        {"q_norm": gaps(W[7].q_norm)},
        "layer 3 (sparse_attention): q_norm: expected contiguous rows, got strides (2,)",
    ),
    (
        8,
        {"gate_up": replace(W[8].gate_up, scale=gaps(W[8].gate_up.scale))},
        f"{MOE}: gate_up.scale: expected contiguous rows, got strides (4096, 16, 2)",
    ),
    (
        8,
        {"down": replace(W[8].down, scale=spoiled(W[8].down.scale, 255))},
        f"{MOE}: down.scale: expected finite positive scales, got 1 other",
    ),
    *(
        (
            7,
            {"o": replace(W[7].o, scale=spoiled(W[7].o.scale, value))},
            "layer 3 (sparse_attention): o.scale: expected finite positive scales, got 1 other",
        )
        for value in (0.0, -1.0, float("nan"), float("inf"))
    ),
    (8, {"bias": W[8].bias.to("meta")}, f"{MOE}: bias: expected it on cpu, it is on meta"),
    (8, {"norm": W[8].norm[:-16]}, f"{MOE}: moe.norm: expected [256], got [240]"),
    (8, {"down": W[8].gate_up}, f"{MOE}: moe.down: expected [17, 256, 128], got [17, 256, 256]"),
]


@pytest.mark.parametrize(("index", "changes", "reason"), BAD_WEIGHTS)
def test_a_weight_that_cannot_be_borrowed(index: int, changes: dict[str, Any], reason: str) -> None:
    model = changed_weights(embedded("m3"), index, **changes)
    assert reasons(bind(model, SERVED, None))[0] == reason


# the certificate, last


def test_without_a_certificate_the_answer_is_no() -> None:
    for name in NAMES:
        assert reasons(bind(embedded(name), SERVED, None)) == (
            "certificate: none was given, and nothing runs fused without one",
        )


def test_the_order_of_the_questions(tmp_path: Path) -> None:
    """Deployment before layers before the certificate; each hides the later ones."""
    model = changed_weights(embedded("m3"), 8, bias=off_by(W[8].bias))
    wrong = replace(SERVED, verify="ragged")
    missing = tmp_path / "missing.json"
    features = {"lora": True}
    assert reasons(bind(model, wrong, missing, features=features)) == (
        "lora: True (want False): is not supported",
        "verify: ragged DSpark shifts the rows of later requests (want 'fixed')",
    )
    assert reasons(bind(model, SERVED, missing)) == (BAD_WEIGHTS[2][2],)
    assert reasons(bind(embedded("m3"), SERVED, missing)) == (
        f"certificate: {str(missing)!r}: expected a readable file: No such file or directory",
    )


@pytest.mark.parametrize("name", NAMES)
def test_with_a_certificate_it_is_bound(tmp_path: Path, allowed: dict[str, Certificate], name: str) -> None:
    path = tmp_path / "c.json"
    allowed[name].write(path)
    for given in (allowed[name], path, str(path)):
        start = time.perf_counter()
        bound = bind(embedded(name), SERVED, given, now=NOW)
        assert time.perf_counter() - start < 2  # the promise; it takes about 0.05 s
        assert isinstance(bound, Bound)
        assert bound.certificate == allowed[name]


def refused_certificate(result: Bound | Refused) -> str:
    (reason,) = reasons(result)
    assert reason.startswith("certificate: ")
    return reason.removeprefix("certificate: ")


def test_a_certificate_for_another_checkpoint(allowed: dict[str, Certificate]) -> None:
    why = refused_certificate(bind(embedded("m3"), SERVED, allowed["m3.1"], now=NOW))
    assert why.startswith("checkpoint: the certificate is for ")


def test_a_checkpoint_with_one_bit_changed(tmp_path: Path, allowed: dict[str, Certificate]) -> None:
    shutil.copytree(TINY / "m3", tmp_path / "m3")
    shard = tmp_path / "m3" / "model-00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    why = refused_certificate(bind(load_model(tmp_path / "m3", SERVED), SERVED, allowed["m3"], now=NOW))
    assert why.startswith("checkpoint: the certificate is for ")


def test_one_byte_of_a_kernel_source_changed(
    tmp_path: Path, allowed: dict[str, Certificate], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mono"
    shutil.copytree(facts_module.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(facts_module, "PACKAGE", package)
    assert bind(embedded("m3"), SERVED, allowed["m3"], now=NOW)
    kernel = package / "fast" / "ops" / "experts.py"
    kernel.write_bytes(kernel.read_bytes()[:-1] + b" ")
    why = refused_certificate(bind(embedded("m3"), SERVED, allowed["m3"], now=NOW))
    assert why.startswith("sources: the certificate is for ")


def test_another_launch_setting(allowed: dict[str, Certificate], monkeypatch: pytest.MonkeyPatch) -> None:
    from mono.fast.tiles import TILES

    monkeypatch.setitem(TILES["attend"]["interpreter"], "SPLITS", 2)
    why = refused_certificate(bind(embedded("m3"), SERVED, allowed["m3"], now=NOW))
    assert why.startswith("sources: the certificate is for ")


def test_other_versions(allowed: dict[str, Certificate], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.__version__", "3.99.0")
    why = refused_certificate(bind(embedded("m3"), SERVED, allowed["m3"], now=NOW))
    assert why.startswith("triton: the certificate is for ")
    monkeypatch.setattr("torch.__version__", "2.99.0")
    why = refused_certificate(bind(embedded("m3"), SERVED, allowed["m3"], now=NOW))
    assert why.startswith("torch: the certificate is for ")


def test_a_certificate_from_a_gpu() -> None:
    of = replace(facts("m3"), device="NVIDIA H200", capability="sm_90")
    why = refused_certificate(bind(embedded("m3"), SERVED, certificate(of), now=NOW))
    assert why == "device: the certificate is for NVIDIA H200, here it is cpu"


def test_more_than_the_certificate_names(allowed: dict[str, Certificate]) -> None:
    wide = replace(SERVED, widths=(8, 16, 32))
    why = refused_certificate(bind(embedded("m3"), wide, allowed["m3"], now=NOW))
    assert why == "width 32: the certificate is for 8, 16"
    longer = replace(SERVED, max_context=1024)
    why = refused_certificate(bind(embedded("m3", longer), longer, allowed["m3"], now=NOW))
    assert why == "max_context 1024: the certificate is for at most 512"
    shorter = replace(SERVED, max_context=256)
    assert bind(embedded("m3"), shorter, allowed["m3"], now=NOW)


def test_another_arm_of_the_prefix(allowed: dict[str, Certificate]) -> None:
    fast = replace(SERVED, prefix="fast")
    why = refused_certificate(bind(embedded("m3.1"), fast, allowed["m3.1"], now=NOW))
    assert why.startswith("deployment: the certificate is for ")
    assert bind(embedded("m3.1"), fast, certificate(facts("m3.1", fast)), now=NOW)


def test_a_certificate_that_judges_itself(allowed: dict[str, Certificate]) -> None:
    class Generous(Certificate):
        def covers(self, facts: object, now: object) -> None:
            return None

    given = {f.name: getattr(allowed["m3.1"], f.name) for f in fields(Certificate)}
    why = refused_certificate(bind(embedded("m3"), SERVED, Generous(**given), now=NOW))
    assert why == "expected a certificate or its path, got Generous"


def test_missing_weights() -> None:
    model = embedded("m3")
    (reason,) = reasons(bind(replace(model, weights=model.weights[:-1]), SERVED, None))
    assert reason == "assemble: 18 slots, 17 weights"


def test_dates(allowed: dict[str, Certificate]) -> None:
    month = timedelta(days=30)
    why = refused_certificate(bind(embedded("m3"), SERVED, allowed["m3"], now=NOW + month))
    assert why == "expired at 2026-03-31T12:00:00Z, it is 2026-03-31T12:00:00Z"
    why = refused_certificate(bind(embedded("m3"), SERVED, allowed["m3"], now=NOW - month))
    assert why == "not valid before 2026-03-01T11:00:00Z, it is 2026-01-30T12:00:00Z"
    with pytest.raises(ValueError, match="now: expected a date with a time zone"):
        bind(embedded("m3"), SERVED, None, now=NOW.replace(tzinfo=None))


def test_now_is_the_present_where_it_is_not_given() -> None:
    from datetime import UTC, datetime

    of, now = facts("m3"), datetime.now(UTC)
    minute = timedelta(minutes=1)
    valid = issue(of, evidence(of), now - minute, now + 60 * minute)
    assert bind(embedded("m3"), SERVED, valid)
    old = issue(of, evidence(of), now - 2 * minute, now - minute)
    assert refused_certificate(bind(embedded("m3"), SERVED, old)).startswith("expired at ")


def test_a_key(tmp_path: Path, allowed: dict[str, Certificate]) -> None:
    path = tmp_path / "c.json"
    allowed["m3"].write(path)
    missing = "hmac: missing, and a key is set"
    assert refused_certificate(bind(embedded("m3"), SERVED, allowed["m3"], key=KEY, now=NOW)) == missing
    assert refused_certificate(bind(embedded("m3"), SERVED, path, key=KEY, now=NOW)).endswith(missing)
    signed = certificate(facts("m3"), KEY)
    assert bind(embedded("m3"), SERVED, signed, key=KEY, now=NOW)
    wrong = refused_certificate(bind(embedded("m3"), SERVED, signed, key=KEY[::-1], now=NOW))
    assert wrong == "hmac: is not that of the content under this key"
    for empty in (b"", b"short"):
        with pytest.raises(ValueError, match=f"key: expected at least 16 bytes, got {len(empty)}"):
            bind(embedded("m3"), SERVED, signed, key=empty, now=NOW)


def edited(stored: dict[str, Any]) -> str:
    stored["evidence"]["steps"] += 1
    return json.dumps(stored)


def forced(stored: dict[str, Any]) -> str:
    stored["evidence"]["performance_only"] = True
    return json.dumps(stored)


def twice(stored: dict[str, Any]) -> str:
    return json.dumps(stored)[:-1] + ', "schema": 1}'


FORGED: list[tuple[Callable[[dict[str, Any]], str], str]] = [
    (edited, "sha256: is not that of the content, which has been altered"),
    (forced, "evidence: performance only: its acceptance was forced, so its tokens are not the model's"),
    (twice, "'schema': expected once, got it twice"),
    (lambda stored: "[" * 10_000, "expected JSON nested at most 8 deep, got deeper"),
    (lambda stored: " " * (1 << 21), "expected at most 1048576 bytes, got more"),
]


@pytest.mark.parametrize(("forge", "reason"), FORGED, ids=[reason for _, reason in FORGED])
def test_a_forged_file(
    tmp_path: Path, allowed: dict[str, Certificate], forge: Callable[[dict[str, Any]], str], reason: str
) -> None:
    path = tmp_path / "c.json"
    allowed["m3"].write(path)
    path.write_text(forge(json.loads(path.read_text())))
    assert refused_certificate(bind(embedded("m3"), SERVED, path, now=NOW)) == f"{str(path)!r}: {reason}"


def test_a_path_that_is_no_file(tmp_path: Path, allowed: dict[str, Certificate]) -> None:
    allowed["m3"].write(tmp_path / "c.json")
    (tmp_path / "link").symlink_to(tmp_path / "c.json")
    for path, got in ((tmp_path, "a directory"), (tmp_path / "link", "a symbolic link")):
        why = refused_certificate(bind(embedded("m3"), SERVED, path, now=NOW))
        assert why == f"{str(path)!r}: expected a regular file, got {got}"


# what a refusal leaves behind


def state_of(model: Model) -> tuple[Any, ...]:
    """Everything of a model that a binding could touch: objects, addresses, bytes."""
    tensors = [(name, t) for weights in model.weights for name, t in binding._tensors(weights)]
    content = hashlib.sha256()
    for _, tensor in tensors:
        content.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return (
        [id(getattr(model, f.name)) for f in fields(model)],
        [id(weights) for weights in model.weights],
        [(name, id(t), t.data_ptr(), t.dtype, t.shape, t.stride(), t._version) for name, t in tensors],
        content.hexdigest(),
        copy.deepcopy(model.checkpoint.config),
    )


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        ({"verify": "confidence"}, {}),
        ({"expert_activations": "bf16"}, {}),
        ({}, {"drafter_taps": (9,)}),
        ({}, {"certificate": "/nowhere"}),
        ({}, {"certificate": "expired"}),
    ],
    ids=["deployment", "layers", "taps", "no file", "expired"],
)
def test_a_refusal_leaves_everything_as_it_was(
    allowed: dict[str, Certificate],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    arguments: dict[str, Any],
) -> None:
    def no_launch(device: torch.device) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr("mono.fast.launch.launch_context", no_launch)
    model = embedded("m3.1")
    given: dict[str, Any] = {"certificate": None, "now": NOW + timedelta(days=99)} | arguments
    if given["certificate"] == "expired":
        given["certificate"] = allowed["m3.1"]
    assert not bind(model, replace(SERVED, **changes), **given)  # imports done
    before, tensors = state_of(model), live_tensors()
    assert not bind(model, replace(SERVED, **changes), **given)
    assert state_of(model) == before
    assert live_tensors() == tensors


def test_a_prefix_on_the_original_modules_builds_no_dense_kernel(
    allowed: dict[str, Certificate], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mono.fast import dense_mlp

    def no_build(*args: Any) -> None:
        raise AssertionError("the dense MLP was built on the fast arm")

    monkeypatch.setattr(dense_mlp, "build", no_build)
    assert bind(embedded("m3.1"), SERVED, allowed["m3.1"], now=NOW)
    with pytest.raises(AssertionError, match="dense MLP was built"):
        bind(embedded("m3"), SERVED, allowed["m3"], now=NOW)


# what is bound


def test_only_bind_makes_a_bound(allowed: dict[str, Certificate]) -> None:
    bound = bind(embedded("m3"), SERVED, allowed["m3"], now=NOW)
    assert isinstance(bound, Bound)
    given = {f.name: getattr(bound, f.name) for f in fields(bound)}
    with pytest.raises(TypeError, match="Bound: only"):
        Bound(**given, door=None)
    with pytest.raises(TypeError, match="door"):
        Bound(**given)
    with pytest.raises((TypeError, ValueError), match="door"):
        replace(bound, assembly=None)
    with pytest.raises(AttributeError):
        bound.assembly = None


def test_only_a_bound_decodes(allowed: dict[str, Certificate]) -> None:
    model = embedded("m3")
    assembly = assemble(model.plan, model.weights, SERVED, "fast")
    refused = bind(model, SERVED, None)
    for other in (model, assembly, refused, allowed["m3"]):
        assert not hasattr(other, "decode")
    assert hasattr(bind(model, SERVED, allowed["m3"], now=NOW), "decode")


def verify_step(requests: int = 1, q_len: int = 8) -> Step:
    rng = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 256, (requests, q_len), generator=rng)
    tables = torch.arange(32 * requests, dtype=torch.int32).view(requests, 32)
    return Step.of(tokens, torch.full((requests,), q_len, dtype=torch.int32), tables, 16)


TAPS = {"m3": (-1, 0, 2, 3, 7), "m3.1": (1, 2, 3, 6, 7)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("requests", [1, 2])
def test_it_decodes_as_its_assembly_does(allowed: dict[str, Certificate], name: str, requests: int) -> None:
    model = embedded(name)
    bound = bind(model, SERVED, allowed[name], TAPS[name], now=NOW)
    assert isinstance(bound, Bound)
    step = verify_step(requests)
    got = bound.decode(step, empty_caches(model.plan, 64))
    assembly = assemble(model.plan, model.weights, SERVED, "fast")
    assert isinstance(assembly, Assembly)
    want = decode.run(assembly, step, empty_caches(model.plan, 64), TAPS[name])
    for mine, theirs in ((got.logits, want.logits), (got.top1, want.top1), (got.taps, want.taps)):
        assert torch.equal(mine, theirs)
    assert got.taps.shape == (8 * requests, 5 * 256)


@pytest.mark.parametrize("name", NAMES)
def test_taps_are_the_references(allowed: dict[str, Certificate], name: str) -> None:
    """Bit for bit where the original modules ran; elsewhere each is nearest to the reference's own."""
    model = embedded(name)
    bound = bind(model, SERVED, allowed[name], TAPS[name], now=NOW)
    assert isinstance(bound, Bound)
    step = verify_step()
    got = bound.decode(step, empty_caches(model.plan, 64)).taps
    assembly = assemble(model.plan, model.weights, SERVED, "reference")
    assert isinstance(assembly, Assembly)
    want = decode.run(assembly, step, empty_caches(model.plan, 64), TAPS[name]).taps
    mine, theirs = (x.float().view(8, 5, 256).transpose(0, 1) for x in (got, want))
    apart = (mine[:, None] - theirs[None]).norm(dim=-1)  # [taps of the fused path, reference's, rows]
    nearest = torch.arange(5)[:, None].expand(5, 8)
    assert torch.equal(apart.argmin(dim=1), nearest)
    original = [k for k, layer in enumerate(TAPS[name]) if layer == -1 or (layer < 3 and name == "m3.1")]
    assert original
    assert torch.equal(mine[original], theirs[original])


def test_a_narrower_step_runs_at_the_next_width(allowed: dict[str, Certificate]) -> None:
    """Three requests run as four."""
    model = embedded("m3")
    wide = replace(SERVED, widths=(8, 16, 32))
    bound = bind(model, wide, certificate(facts("m3", wide)), now=NOW)
    assert isinstance(bound, Bound)
    step = verify_step(3)
    got = bound.decode(step, empty_caches(model.plan, 96))
    assembly = bound.assembly
    want = decode.run(assembly, step.padded_to(32), empty_caches(model.plan, 96))
    assert got.logits.shape[0] == 24
    assert torch.equal(got.logits, want.logits[:24])
    assert torch.equal(got.top1, want.top1[:24])
    assert got.taps.shape == (24, 0)


def test_a_step_that_does_not_fit_is_an_error_before_any_launch(
    allowed: dict[str, Certificate], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = embedded("m3")
    bound = bind(model, SERVED, allowed["m3"], now=NOW)
    assert isinstance(bound, Bound)
    caches = empty_caches(model.plan, 96)
    before = [cache.clone() for cache in caches]
    for step, reason in (
        (verify_step(3), "24 rows, bound for 1 to 16"),
        (verify_step(1, q_len=1), "1 rows a request, bound for 8"),
    ):
        with pytest.raises(ValueError, match="the step was declined") as caught:
            bound.decode(step, caches)
        assert str(caught.value).endswith(reason)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.k.view(torch.uint8), old.k.view(torch.uint8))


def test_the_public_names() -> None:
    assert (mono.bind, mono.Bound, mono.Certificate) == (bind, Bound, certificates.Certificate)
