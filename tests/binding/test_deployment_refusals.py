"""Every reason against a deployment, with its words, and their order."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from binding.issuing import embedded

from mono.deployment import Deployment
from mono.deployment_refusals import BATCHING, PARALLEL, refuse_deployment
from mono.models.minimax_m3 import ARCHITECTURES

KNOWN = ARCHITECTURES[0]
FITS = Deployment()

# what is wrong: fields of the deployment, features of the engine, and the one reason; in the order of reports
ROWS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"tp_size": 4}, {}, "tp_size: TP 4 (want 1)"),
    ({}, {"data_parallel_size": 2}, "data_parallel_size: 2 (want 1): is not supported"),
    ({}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size: 2 (want 1): is not supported"),
    ({}, {"expert_parallel": True}, "expert_parallel: True (want False): is not supported"),
    ({}, {"decode_context_parallel_size": 8}, "decode_context_parallel_size: 8 (want 1): is not supported"),
    ({}, {"prefill_context_parallel_size": 2}, "prefill_context_parallel_size: 2 (want 1): is not supported"),
    ({}, {"expert_load_balancing": True}, "expert_load_balancing: True (want False): is not supported"),
    ({}, {"lora": True}, "lora: True (want False): is not supported"),
    (
        {},
        {"kv_transfer_connector": "SomeConnector"},
        "kv_transfer_connector: 'SomeConnector' (want False): is not supported",
    ),
    ({}, {"sleep_mode": True}, "sleep_mode: True (want False): is not supported"),
    ({}, {"plugin_mode": True}, "plugin_mode: True (want False): is not supported"),
    ({}, {"a_feature": 1}, "'a_feature': is not a feature that is known to be supported, got 1"),
    ({}, {"b_feature": "on"}, "'b_feature': is not a feature that is known to be supported, got 'on'"),
    (
        {"kv_format": "bf16"},
        {"index_cache_dtype": "fp8_e4m3"},
        "kv_format: the KV cache is bf16 (want fp8_e4m3)",
    ),
    ({}, {"index_cache_dtype": "fp4"}, "index_cache_dtype: the index cache is fp4 (want fp8_e4m3)"),
    (
        {"max_context": 1_048_577},
        {},
        "max_context: 1048577 is more than the 1048576 tokens that block scores span",
    ),
    (
        {"linears": "checkpoint"},
        {},
        "linears: attention and dense linears are 'checkpoint' (want 'ptpc_fp8')",
    ),
    (
        {"shared_expert": "apart"},
        {},
        "shared_expert: is not fused into the MXFP4 experts; deployment.shared_expert='fused' does it",
    ),
    ({}, {"two_batch_overlap": True}, "two_batch_overlap: True (want False): is not supported"),
    ({}, {"micro_batching": True}, "micro_batching: True (want False): is not supported"),
    (
        {},
        {"cuda_graphs": "piecewise"},
        "cuda_graphs: 'piecewise' (want 'full' or 'none': a fused layer cannot be split)",
    ),
    (
        {},
        {"speculative_method": "eagle3"},
        "speculative_method: 'eagle3' (want 'dspark' with fixed verify, or none)",
    ),
    (
        {"verify": "confidence"},
        {},
        "verify: confidence-scheduled DSpark gives each request its own number of rows (want 'fixed')",
    ),
    ({"verify": "ragged"}, {}, "verify: ragged DSpark shifts the rows of later requests (want 'fixed')"),
    ({"draft_len": 3}, {}, "draft_len: 3 (want 7: 8 rows a request)"),
    ({"widths": (8, 12, 16, 24)}, {}, "widths: 12, 24 (want some of 1, 2, 4, 8, 16, 32)"),
    ({"widths": (8,)}, {}, "widths: 16 missing, always built"),
    ({"widths": (1, 4)}, {}, "widths: 8 and 16 missing, always built"),
]
REASONS = [reason for _, _, reason in ROWS]


@pytest.mark.parametrize(("fields", "features", "reason"), ROWS, ids=REASONS)
def test_a_reason_and_its_words(fields: dict[str, Any], features: dict[str, Any], reason: str) -> None:
    assert refuse_deployment(KNOWN, replace(FITS, **fields), features) == (reason,)


def test_every_feature_that_can_be_off_has_a_row() -> None:
    in_rows = {name for _, features, _ in ROWS for name in features}
    assert {*PARALLEL, *BATCHING} <= in_rows


def test_an_unknown_architecture() -> None:
    assert refuse_deployment("LlamaForCausalLM", FITS) == (
        f"architecture: 'LlamaForCausalLM' is not known; known are {', '.join(ARCHITECTURES)}",
    )


def test_all_reasons_together_in_order() -> None:
    # of the fields that have several wrong values, the last in the table
    fields = {name: value for f, _, _ in ROWS for name, value in f.items()} | {"widths": (4, 12)}
    features = {name: value for _, f, _ in ROWS for name, value in f.items()}
    backwards = dict(reversed(features.items()))
    got = refuse_deployment("Unknown", replace(FITS, **fields), backwards)
    assert got == refuse_deployment("Unknown", replace(FITS, **fields), features)
    assert got[0].startswith("architecture: 'Unknown'")
    shadowed = {
        "verify: confidence-scheduled DSpark gives each request its own number of rows (want 'fixed')",
        "widths: 12, 24 (want some of 1, 2, 4, 8, 16, 32)",
        "widths: 16 missing, always built",
    }
    expected = [reason for reason in REASONS if reason not in shadowed]
    expected.insert(-1, "widths: 12 (want some of 1, 2, 4, 8, 16, 32)")
    assert list(got[1:]) == expected


def test_the_index_cache_is_the_kv_caches_where_unset() -> None:
    bf16 = Deployment(kv_format="bf16")
    both = (
        "kv_format: the KV cache is bf16 (want fp8_e4m3)",
        "index_cache_dtype: the index cache is bf16 (want fp8_e4m3)",
    )
    assert refuse_deployment(KNOWN, bf16) == both
    assert refuse_deployment(KNOWN, bf16, {"index_cache_dtype": None}) == both


OFF = {
    **{name: values[0] for name, values in (PARALLEL | BATCHING).items()},
    "cuda_graphs": "full",
    "speculative_method": "dspark",
    "index_cache_dtype": "fp8_e4m3",
    "something_new": False,
    "something_unset": None,
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "deployment",
    [
        FITS,
        Deployment(widths=(1, 2, 4, 8, 16, 32)),
        Deployment(verify="off", draft_len=0),
        Deployment(expert_activations="bf16", prefix="fast"),
    ],
    ids=["default", "every width", "no drafts", "other activations, fast prefix"],
)
def test_nothing_against_it(architecture: str, deployment: Deployment) -> None:
    assert refuse_deployment(architecture, deployment) == ()
    assert refuse_deployment(architecture, deployment, OFF) == ()


@pytest.mark.parametrize(("name", "value"), [("expert_parallel", 0), ("data_parallel_size", True)])
def test_a_value_of_another_type_is_not_off(name: str, value: object) -> None:
    """0 == False and 1 == True in Python; a configuration that mixes them up is refused."""
    assert len(refuse_deployment(KNOWN, FITS, {name: value})) == 1


MODEL_ROWS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"block_size": 128}, "block_size: 128 (want 16, the model's sparse block)"),
    ({}, {"block_size": 16.0}, "block_size: 16.0 (want 16, the model's sparse block)"),
    ({"max_context": 4096}, {}, "max_context: 4096 is more than the model's 2048 positions"),
    ({"max_context": 1000}, {}, "max_context: 1000 is no whole number of KV blocks of 16"),
]


@pytest.mark.parametrize(("fields", "features", "reason"), MODEL_ROWS, ids=[r for _, _, r in MODEL_ROWS])
def test_a_reason_that_needs_the_models_configuration(
    fields: dict[str, Any], features: dict[str, Any], reason: str
) -> None:
    deployment = replace(Deployment(max_context=2048), **fields)
    config = embedded("m3").config
    assert refuse_deployment(KNOWN, deployment, features, config) == (reason,)
    assert refuse_deployment(KNOWN, Deployment(max_context=2048), {"block_size": 16}, config) == ()


def test_a_model_without_a_shared_expert_has_none_to_fuse() -> None:
    config = replace(embedded("m3").config, shared_experts=0)
    deployment = Deployment(max_context=2048, shared_expert="apart")
    assert refuse_deployment(KNOWN, deployment, {}, config) == ()


def test_it_touches_neither_triton_nor_a_device() -> None:
    code = """
import sys, torch
from mono.deployment import Deployment
from mono.deployment_refusals import refuse_deployment
def no(*args, **kw): raise AssertionError("a device was touched")
torch.cuda._lazy_init = torch.Tensor.to = torch.empty = torch.zeros = no
assert refuse_deployment("MiniMaxM3SparseForCausalLM", Deployment(), {"lora": True})
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
