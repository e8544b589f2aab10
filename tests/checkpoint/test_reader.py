"""A checkpoint opens lazily, says what it holds, and says in one line what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint.make import LAYOUTS, LM, Made, make
from safetensors.torch import load_file, save_file
from torch import Tensor

from mono.checkpoint import CheckpointError, load_checkpoint
from mono.checkpoint.names import canonical, is_text
from mono.formats import Nvfp4, PtpcFp8

ATTENTION = f"{LM}model.layers.0.self_attn."
EXPERT = f"{LM}model.layers.2.block_sparse_moe.experts.1."
INDEX = "model.safetensors.index.json"


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bytes, dtype and shape."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("shard_bytes", [1, 40_000, 10**9])
def test_what_was_written_comes_back(tmp_path: Path, shard_bytes: int) -> None:
    made = make(layout="release", drafter=True)
    made.shard_bytes = shard_bytes
    checkpoint = load_checkpoint(made.write(tmp_path / "c"))
    assert checkpoint.names == tuple(sorted(made.tensors))
    assert checkpoint.config == made.config
    assert checkpoint.text_config == made.config["text_config"]
    for name, tensor in made.tensors.items():
        got = checkpoint.tensor(name)
        assert same(got.reshape(-1), tensor.reshape(-1))
        assert got.shape == tensor.shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_matrix_is_recognised_by_its_tensors(tmp_path: Path, layout: str) -> None:
    made = make(layout=layout)
    checkpoint = load_checkpoint(made.write(tmp_path / "c"))
    for prefix, matrix in made.matrices.items():
        got = checkpoint.matrix(prefix)
        found = checkpoint.find(prefix)
        assert found.format == got.format_name
        assert found.shape == tuple(got.shape)
        if isinstance(matrix, Tensor):
            assert same(got.values, matrix)
            continue
        assert type(got) is type(matrix)
        assert torch.equal(got.dequantise(), matrix.dequantise())
        if isinstance(got, Nvfp4):
            assert got.convention == matrix.convention


def test_ptpc_and_e8m0_dtype_are_recognised(tmp_path: Path) -> None:
    made = make(layout="mxfp8")
    mxfp8_scale = made.tensors[f"{ATTENTION}q_proj.weight_scale_inv"]
    made.tensors[f"{ATTENTION}q_proj.weight_scale_inv"] = mxfp8_scale.view(torch.float8_e8m0fnu)
    made.config["quantization_config"] = {"quant_method": "quark"}
    del made.tensors[f"{ATTENTION}k_proj.weight_scale_inv"]
    made.tensors[f"{ATTENTION}k_proj.weight_scale"] = torch.linspace(1, 2, 32)[:, None]
    checkpoint = load_checkpoint(made.write(tmp_path / "c"))
    assert same(checkpoint.matrix(f"{ATTENTION}q_proj").scale, mxfp8_scale)
    ptpc = checkpoint.matrix(f"{ATTENTION}k_proj")
    assert isinstance(ptpc, PtpcFp8)
    assert torch.equal(ptpc.scale, torch.linspace(1, 2, 32))


@pytest.mark.parametrize("where", ["its own folder", "the target's files"])
def test_the_drafter_is_a_checkpoint_of_its_own(tmp_path: Path, where: str) -> None:
    made = make(drafter=True)
    assert made.drafter is not None
    config, tensors = made.drafter
    if where == "the target's files":
        made.tensors |= tensors
        made.drafter = None
    folder = made.write(tmp_path / "c")
    (folder / "dspark").mkdir(exist_ok=True)
    (folder / "dspark" / "config.json").write_text(json.dumps(config))

    checkpoint = load_checkpoint(folder)
    assert not any("dspark" in name for name in checkpoint.names)
    assert checkpoint.drafter_config == config
    drafter = checkpoint.drafter()
    assert drafter is not None
    assert drafter.text_config == config["text_config"]
    q_proj = "layers.0.decoder_layer.self_attn.q_proj"
    assert drafter.names == ("fc.weight", f"{q_proj}.weight", f"{q_proj}.weight_scale_inv")
    assert same(drafter.tensor("fc.weight"), tensors[f"{LM}model.dspark.fc.weight"])
    assert drafter.matrix(q_proj).format_name == "mxfp8"


def test_without_a_drafter_there_is_none(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make().write(tmp_path / "c"))
    assert checkpoint.drafter() is None
    assert checkpoint.drafter_config is None


def test_a_drafter_needs_its_configuration(tmp_path: Path) -> None:
    made = make(drafter=True)
    assert made.drafter is not None
    made.tensors |= made.drafter[1]
    made.drafter = None
    with pytest.raises(
        CheckpointError, match=r"dspark\.\S+: expected \S+dspark/config.json beside a drafter"
    ):
        load_checkpoint(made.write(tmp_path / "c"))


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.language_model.model.norm.weight", "language_model.model.norm.weight"),
        ("language_model.lm_head.weight", "language_model.lm_head.weight"),
        ("model.layers.3.self_attn.q_proj.weight", "language_model.model.layers.3.self_attn.q_proj.weight"),
        ("lm_head.weight", "language_model.lm_head.weight"),
        ("a.experts.7.gate_proj.weight_scale", "a.experts.7.w1.weight_scale"),
        ("a.experts.7.up_proj.weight", "a.experts.7.w3.weight"),
        ("a.experts.7.down_proj.weight", "a.experts.7.w2.weight"),
        ("a.shared_experts.down_proj.weight", "a.shared_experts.down_proj.weight"),
        ("vision_tower.blocks.0.weight", "vision_tower.blocks.0.weight"),
    ],
)
def test_spellings_of_a_name(stored: str, name: str) -> None:
    assert canonical(stored) == name
    assert canonical(name) == name


def test_the_vision_tower_is_not_the_text_decoder() -> None:
    parts = ("vision_tower.a", "multi_modal_projector.a", "patch_merge_mlp.a", "model.vision_tower.a")
    assert not any(is_text(part) for part in parts)
    assert is_text(f"{LM}model.norm.weight")


def test_a_name_in_two_spellings_is_a_duplicate(tmp_path: Path) -> None:
    made = make()
    made.tensors[f"model.{LM}model.norm.weight"] = made.tensors[f"{LM}model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"norm.weight: expected once, \S+ \S+norm.weight is the same"):
        load_checkpoint(made.write(tmp_path / "c"))


# what a matrix can be wrong about


def change(name: str, to: Callable[[Tensor], Tensor]) -> Callable[[Made], None]:
    def apply(made: Made) -> None:
        made.tensors[name] = to(made.tensors[name])

    return apply


def drop(name: str) -> Callable[[Made], None]:
    def apply(made: Made) -> None:
        del made.tensors[name]

    return apply


def put(value: float, at: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    def to(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        if changed.dtype == torch.float8_e4m3fn:
            changed.view(torch.uint8)[at] = int(value)
        else:
            changed[at] = value
        return changed

    return to


Q = f"{ATTENTION}q_proj"
MATRIX_ERRORS = [
    ("quark", drop(f"{Q}.weight"), Q, r"q_proj: expected bf16, .* got weight_scale_inv U8"),
    ("quark", drop(f"{EXPERT}w1.weight_scale"), f"{EXPERT}w1", r"w1: expected bf16, .* got weight U8$"),
    ("bf16", drop(f"{Q}.weight"), Q, r"q_proj.weight: missing$"),
    ("bf16", change(f"{Q}.weight", torch.Tensor.float), Q, r"q_proj: expected bf16, .* got weight F32$"),
    ("bf16", change(f"{Q}.weight", torch.flatten), Q, r"expected two dimensions, got \[4096\]$"),
    ("bf16", change(f"{Q}.weight", put(float("nan"), (3, 5))), Q, r"finite values, got 1 NaN or inf.* 4096$"),
    ("bf16", change(f"{Q}.weight", put(float("inf"), (3, 5))), Q, r"finite values, got 1 NaN or inf.* 4096$"),
    ("mxfp8", change(f"{Q}.weight", put(0x7F, (3, 5))), Q, r"q_proj.weight: expected finite values, got 1 "),
    ("mxfp8", change(f"{Q}.weight", put(0xFF, (3, 5))), Q, r"q_proj.weight: expected finite values, got 1 "),
    (
        "mxfp8",
        change(f"{Q}.weight_scale_inv", put(255, (3, 1))),
        Q,
        r"q_proj.weight_scale_inv: expected E8M0 bytes below 255 \(NaN\), got 1 of it$",
    ),
    (
        "quark",
        change(f"{EXPERT}w2.weight_scale", put(255, (3, 0))),
        f"{EXPERT}w2",
        r"weight_scale: .* below 255",
    ),
    (
        "mxfp8",
        change(f"{Q}.weight_scale_inv", lambda s: s[:, :1]),
        Q,
        r"weight_scale_inv: expected \[64, 2\] for mxfp8 \[64, 64\], got \[64, 1\]$",
    ),
    (
        "mxfp8",
        change(f"{Q}.weight_scale_inv", lambda s: s.float()),
        Q,
        r"expected bf16, .* got weight F8_E4M3, weight_scale_inv F32$",
    ),
    ("quark", change(f"{EXPERT}w2.weight", lambda w: w[:, :12]), f"{EXPERT}w2", r"multiple of 32 .*got 24$"),
    (
        "release",
        change(f"{EXPERT}w1.weight_global_scale", lambda s: -s),
        f"{EXPERT}w1",
        r"weight_global_scale: expected finite positive scales, got 1 other of 1$",
    ),
    (
        "modelopt",
        change(f"{EXPERT}w1.weight_scale_2", lambda s: s * 0),
        f"{EXPERT}w1",
        r"weight_scale_2: expected finite positive scales, got 1 other of 1$",
    ),
    (
        "modelopt",
        change(f"{EXPERT}w1.weight_scale_2", lambda s: s.repeat(2)),
        f"{EXPERT}w1",
        r"weight_scale_2: expected \[\] or \[1\] for nvfp4 \[32, 64\], got \[2\]$",
    ),
    (
        "modelopt",
        change(f"{EXPERT}w1.weight_scale", put(0x7F, (0, 0))),
        f"{EXPERT}w1",
        r"finite values, got 1",
    ),
    (
        "modelopt",
        change(f"{EXPERT}w1.weight_scale", put(0x81, (0, 0))),
        f"{EXPERT}w1",
        r"no negative scale, got 1",
    ),
]


@pytest.mark.parametrize(("layout", "spoil", "prefix", "message"), MATRIX_ERRORS)
def test_a_spoilt_matrix_is_named(
    tmp_path: Path, layout: str, spoil: Callable[[Made], None], prefix: str, message: str
) -> None:
    made = make(layout=layout)
    spoil(made)
    checkpoint = load_checkpoint(made.write(tmp_path / "c"))
    with pytest.raises(CheckpointError, match=message) as raised:
        checkpoint.matrix(prefix)
    assert "\n" not in str(raised.value)
    assert str(tmp_path) in str(raised.value)
    assert prefix in str(raised.value)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_ptpc_scale_is_finite_and_positive(tmp_path: Path, scale: float) -> None:
    made = make(layout="mxfp8")
    made.config["quantization_config"] = {"quant_method": "quark"}
    del made.tensors[f"{Q}.weight_scale_inv"]
    made.tensors[f"{Q}.weight_scale"] = put(scale, (5,))(torch.ones(64))
    checkpoint = load_checkpoint(made.write(tmp_path / "c"))
    with pytest.raises(CheckpointError, match=r"q_proj.weight_scale: expected finite .*, got 1 "):
        checkpoint.matrix(Q)


# what quantization_config can be wrong about


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "awq"}, r"quant_method: expected one of \['compressed-tensors', .*\], got 'awq'$"),
        ({}, r"quant_method: expected one of .*, got None$"),
        (
            {"quant_method": "mxfp8", "weight_block_size": [128, 128]},
            r"expected \[1, 32\], got \[128, 128\]$",
        ),
        ({"quant_method": "quark", "exclude": "lm_head"}, r"exclude: expected a list of patterns"),
        (
            {"quant_method": "quark", "exclude": ["re:(("]},
            r"exclude: expected patterns, got 're:\(\(': missing",
        ),
    ],
)
def test_an_unknown_quantisation_stops_at_the_door(
    tmp_path: Path, said: dict[str, object], message: str
) -> None:
    made = make(layout="quark")
    made.config["quantization_config"] = said
    with pytest.raises(CheckpointError, match=r"config.json: .*" + message):
        load_checkpoint(made.write(tmp_path / "c"))


@pytest.mark.parametrize(
    ("layout", "said", "prefix", "message"),
    [
        ("quark", None, Q, r"expected bf16 under quant_method None, got mxfp8$"),
        ("quark", {"quant_method": "mxfp8"}, f"{EXPERT}w1", r"expected bf16, mxfp8 under .*, got mxfp4$"),
        ("modelopt", {"quant_method": "compressed-tensors"}, f"{EXPERT}w1", r"got nvfp4 modelopt$"),
        ("release", {"quant_method": "modelopt"}, f"{EXPERT}w1", r"got nvfp4 compressed-tensors$"),
        (
            "quark",
            {"quant_method": "quark", "exclude": ["*experts.1.*"]},
            f"{EXPERT}w1",
            r"expected no mxfp4, for '\*experts.1.\*' is excluded, got mxfp4$",
        ),
        (
            "quark",
            {"quant_method": "quark", "exclude": ["model.layers.2.block_sparse_moe"]},
            f"{EXPERT}w1",
            r"is excluded, got mxfp4$",
        ),
        (
            "quark",
            {"quant_method": "quark", "exclude": [r"re:experts\.\d\.w1$"]},
            f"{EXPERT}w1",
            r"is excluded",
        ),
    ],
)
def test_a_configuration_that_contradicts_the_tensors(
    tmp_path: Path, layout: str, said: dict[str, object] | None, prefix: str, message: str
) -> None:
    made = make(layout=layout)
    made.config["quantization_config"] = said
    checkpoint = load_checkpoint(made.write(tmp_path / "c"))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.matrix(prefix)


def test_excluding_the_router_does_not_exclude_gate_proj(tmp_path: Path) -> None:
    made = make(layout="quark, shared too")
    checkpoint = load_checkpoint(made.write(tmp_path / "c"))
    assert "*block_sparse_moe.gate" in made.config["quantization_config"]["exclude"]
    shared = f"{LM}model.layers.2.block_sparse_moe.shared_experts.gate_proj"
    assert checkpoint.matrix(shared).format_name == "mxfp4"


# what files can be wrong about


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make().write(tmp_path / "c")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_truncated_file_is_found_at_open(folder: Path, cut: int) -> None:
    content = shards(folder)[1].read_bytes()
    shards(folder)[1].write_bytes(content[:-cut])
    with pytest.raises(
        CheckpointError, match=rf"truncated: expected bytes up to \d+, file has {len(content) - cut}$"
    ):
        load_checkpoint(folder)


@pytest.mark.parametrize("left", [0, 7, 100])
def test_a_truncated_header_is_found_at_open(folder: Path, left: int) -> None:
    shards(folder)[0].write_bytes(shards(folder)[0].read_bytes()[:left])
    with pytest.raises(CheckpointError, match=r"00001-of-.*: truncated: expected a header of"):
        load_checkpoint(folder)


def test_surplus_bytes_are_found_at_open(folder: Path) -> None:
    size = shards(folder)[0].stat().st_size
    with shards(folder)[0].open("ab") as opened:
        opened.write(b"x")
    with pytest.raises(CheckpointError, match=rf"expected {size} bytes, got {size + 1}$"):
        load_checkpoint(folder)


def rewrite_header(file: Path, old: bytes, new: bytes) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].replace(old, new, 1)
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def test_metadata_is_not_read(folder: Path) -> None:
    rewrite_header(shards(folder)[0], b'"format":"pt"', b'"format":3')
    checkpoint = load_checkpoint(folder)
    for name in checkpoint.names:
        checkpoint.tensor(name)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"BF16"', b'"BF17"', r"expected a dtype of \[.*\], got 'BF17'$"),
        (b'"BF16"', b'"F32"', r"expected \d+ bytes for F32 \[.*\], got offsets \d+ to \d+$"),
        (b'"shape":[64', b'"shape":[-64', r"expected dtype, shape and data_offsets"),
        (b'"shape":[64', b'"shape":[65', r"expected \d+ bytes for"),
        (b"{", b"[", r"expected JSON, got"),
        (
            b'"language_model.model.layers.0.self_attn.k_norm',
            b'"language_model.model.layers.0.self_attn.q_norm',
            r"once, got 2 times$",
        ),
    ],
)
def test_a_wrong_header_is_found_at_open(folder: Path, old: bytes, new: bytes, message: str) -> None:
    rewrite_header(shards(folder)[0], old, new)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_a_header_beyond_the_formats_limit_is_not_read(folder: Path) -> None:
    with shards(folder)[0].open("r+b") as opened:
        opened.write((200_000_000).to_bytes(8, "little"))
        opened.truncate(300_000_000)  # sparse: takes no room
    with pytest.raises(CheckpointError, match="expected a header of at most 100000000 bytes, got 200000000"):
        load_checkpoint(folder)


@pytest.mark.parametrize("to", ["nowhere", "."])
def test_a_file_that_cannot_be_read_is_named(folder: Path, to: str) -> None:
    (folder / INDEX).unlink()
    (folder / "stray.safetensors").symlink_to(to)
    with pytest.raises(CheckpointError, match=r"stray\.safetensors: expected a readable file, got"):
        load_checkpoint(folder)


def test_a_file_that_shrinks_after_it_was_opened(folder: Path) -> None:
    checkpoint = load_checkpoint(folder)
    entry = max(checkpoint.entries.values(), key=lambda entry: (entry.file, entry.stop))
    with entry.file.open("r+b") as opened:
        opened.truncate(entry.stop - 1)
    size = entry.stop - entry.start
    name = next(name for name, at in checkpoint.entries.items() if at is entry)
    with pytest.raises(CheckpointError, match=rf"truncated: expected {size} bytes, got {size - 1}$"):
        checkpoint.tensor(name)


def test_overlapping_tensors_are_found_at_open(tmp_path: Path) -> None:
    made = make()
    made.tensors = {"a": torch.zeros(4), "b": torch.zeros(4)}
    folder = made.write(tmp_path / "c")
    rewrite_header(folder / "model.safetensors", b'"data_offsets":[16,32]', b'"data_offsets":[0,16]')
    with pytest.raises(CheckpointError, match=r"b: expected to start at byte \d+, got \d+$"):
        load_checkpoint(folder)


def test_an_index_naming_a_file_that_is_not_there(folder: Path) -> None:
    shards(folder)[1].unlink()
    with pytest.raises(
        CheckpointError, match=r"index.json: \S+: expected in 'model-00002-of-\d+.safetensors', no"
    ):
        load_checkpoint(folder)


@pytest.mark.parametrize("elsewhere", ["../stray.safetensors", "config.json/../../stray.safetensors"])
def test_an_index_does_not_lead_out_of_the_folder(folder: Path, elsewhere: str) -> None:
    save_file({"stray": torch.zeros(1)}, folder.parent / "stray.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["stray"] = elsewhere
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"stray: expected in .*, no such file in the folder"):
        load_checkpoint(folder)


def test_a_tensor_in_two_files(folder: Path) -> None:
    first, second = shards(folder)[:2]
    name = next(iter(load_file(first)))
    save_file(load_file(second) | {name: torch.zeros(1)}, second)
    with pytest.raises(CheckpointError, match=rf"{name}: expected in one file, also in {first.name}$"):
        load_checkpoint(folder)


def test_a_tensor_the_index_leaves_out_or_misplaces(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    name = f"{LM}lm_head.weight"
    home = index["weight_map"].pop(name)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=rf"{name}: expected in the index under '{home}', got 'nothing'$"
    ):
        load_checkpoint(folder)
    index["weight_map"][name] = shards(folder)[0].name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=rf"expected in the index under '{home}', got '{shards(folder)[0].name}'$"
    ):
        load_checkpoint(folder)


def test_a_tensor_only_the_index_knows(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["ghost"] = shards(folder)[0].name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"00001-of-\S+: ghost: expected by the index, not in the file$"
    ):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "config.json: expected a file, there is none"),
        ("config.json", "{", "config.json: expected JSON, got"),
        ("config.json", "[" * 100_000, "config.json: expected JSON, got maximum recursion depth"),
        ("config.json", f'{{"a": {"9" * 5000}}}', "config.json: expected JSON, got Exceeds the limit"),
        ("config.json", "[]", "config.json: expected a JSON object, got list"),
        ("config.json", '{"a": 1, "a": 2}', "config.json: a: expected once, got 2 times"),
        ("config.json", '{"text_config": 3}', "text_config: expected an object, got int"),
        (INDEX, "{}", "weight_map: expected an object of file names, got None"),
        (INDEX, f'{{"weight_map": {{"a": "{"x" * 5000}"}}}}', "xxx: expected a readable file, got File name"),
        (INDEX, '{"weight_map": {"a": 3}}', "weight_map: expected an object of file names"),
    ],
)
def test_a_wrong_json_file(folder: Path, file: str, content: str | None, message: str) -> None:
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_a_folder_without_tensors(folder: Path) -> None:
    for file in [*shards(folder), folder / INDEX]:
        file.unlink()
    with pytest.raises(CheckpointError, match=r"expected \*.safetensors files, there are none"):
        load_checkpoint(folder)


def test_a_name_that_is_not_there(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing.weight: missing$"):
        load_checkpoint(folder).tensor("nothing.weight")


def test_a_tensor_owns_its_memory(folder: Path) -> None:
    checkpoint = load_checkpoint(folder)
    name = f"{LM}model.norm.weight"
    checkpoint.tensor(name).zero_()
    assert checkpoint.tensor(name).any()
