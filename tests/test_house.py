"""House law: one name in every room, arms apart, mono without audit, import without a GPU."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = ["dense_attention", "dense_mlp", "embed", "head", "moe", "sparse_attention"]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(*rooms: str) -> list[Path]:
    return [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]


def names(room: str) -> list[str]:
    return sorted(p.stem for p in (ROOT / room).glob("*.py") if p.stem not in {"__init__", "checks"})


def test_a_layer_type_has_one_name_in_every_room() -> None:
    from mono.layers import LAYER_TYPES

    assert sorted(LAYER_TYPES) == names("mono/layers") == NAMES
    for room in ("mono/reference", "mono/fast"):
        assert set(NAMES) <= set(names(room))
    assert {f"test_{n}" for n in NAMES} <= set(names("tests/layers"))


@pytest.mark.parametrize("name", NAMES)
def test_arms_have_the_same_signatures(name: str) -> None:
    from mono import fast, reference

    for function in ("refuse", "build"):
        ours = list(inspect.signature(getattr(reference.ARMS[name], function)).parameters)
        theirs = list(inspect.signature(getattr(fast.ARMS[name], function)).parameters)
        assert [p for p in ours if p != "numerics"] == theirs


def test_readable_rooms_never_import_triton() -> None:
    rooms = files("mono/reference", "mono/layers", "mono/formats", "mono/dspark", "mono/caches")
    assert not [p for p in rooms if any(m.split(".")[0] == "triton" for m in imports(p))]


def test_arms_never_import_each_other() -> None:
    assert not [p for p in files("mono/reference") if any("mono.fast" in m for m in imports(p))]
    assert not [p for p in files("mono/fast") if any("mono.reference" in m for m in imports(p))]


def test_mono_never_imports_audit() -> None:
    assert not [p for p in files("mono") if any(m.split(".")[0] in {"audit", "tests"} for m in imports(p))]


def test_nothing_reads_the_environment() -> None:
    for path in files("mono", "audit"):
        text = path.read_text()
        assert "os.environ" not in text, path
        assert "getenv" not in text, path


def test_pickle_is_never_used() -> None:
    for path in files("mono", "audit"):
        assert not {"pickle", "torch.load", "torch.save"} & imports(path), path
        assert "torch.load(" not in path.read_text(), path
        assert "torch.save(" not in path.read_text(), path


def test_importing_mono_needs_neither_triton_nor_a_gpu() -> None:
    code = "import sys, mono; assert not {'triton', 'audit', 'scipy'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
