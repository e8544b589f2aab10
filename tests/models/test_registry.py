"""An architecture is known by name, and `import mono` stays cheap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint.make import make

import mono
from mono.checkpoint import CheckpointError, load_checkpoint
from mono.deployment import Deployment
from mono.models import MODELS, architecture_of, load_model, minimax_m3

ARCHITECTURES = ["MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"]


def test_both_names_lead_to_one_module() -> None:
    assert sorted(MODELS) == ARCHITECTURES
    assert set(MODELS.values()) == {minimax_m3}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_known_architecture(tmp_path: Path, name: str) -> None:
    made = make()
    made.config["architectures"] = [name]
    assert architecture_of(load_checkpoint(made.write(tmp_path / "c"))) == name


@pytest.mark.parametrize("named", [["LlamaForCausalLM"], [], None, "MiniMaxM3SparseForCausalLM", [3]])
def test_an_unknown_architecture_is_told_the_known_ones(tmp_path: Path, named: object) -> None:
    made = make()
    made.config["architectures"] = named
    folder = made.write(tmp_path / "c")
    with pytest.raises(
        CheckpointError, match=r"config.json: architectures: expected one of \['MiniMaxM3Sparse"
    ):
        load_model(folder, Deployment())


def test_the_public_names_are_there() -> None:
    assert mono.load_checkpoint is load_checkpoint
    assert mono.Deployment is Deployment
    assert {getattr(mono, name).__name__ for name in mono.__all__} == set(mono.__all__)
    with pytest.raises(AttributeError, match="module 'mono' has no attribute 'nothing'"):
        _ = mono.nothing


def test_importing_mono_imports_nothing_heavy() -> None:
    code = "import sys, mono; assert not {'torch', 'triton', 'safetensors'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_loading_needs_no_triton() -> None:
    code = "import sys, mono.models; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
