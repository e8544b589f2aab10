"""`python -m audit.compare`: exit codes, one clear line for unusable input, and nothing half-written."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from audit.compare import main
from audit.inputs import EMBEDDED, Unusable
from audit.report import WholeFile

FAST = ["--device", "cpu"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of an embedded checkpoint that a test may damage."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(EMBEDDED["m3.1"], copy)
    return copy


def config_changed(folder: Path, *keys: str, value: object) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    inner = config
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    file.write_text(json.dumps(config))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that unusable input ends in."""
    assert main([*FAST, *arguments]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.strip().splitlines()
    assert line.startswith("audit.compare: ")
    return line


def test_unknown_architecture(checkpoint, capsys) -> None:
    config_changed(checkpoint, "architectures", value=["GuessworkForCausalLM"])
    line = refused(capsys, "--checkpoint", str(checkpoint))
    assert "architectures" in line
    assert "GuessworkForCausalLM" in line


def test_unknown_quantisation_method(checkpoint, capsys) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    keys = (
        ("quantization_config",)
        if "quantization_config" in config
        else ("text_config", "quantization_config")
    )
    config_changed(checkpoint, *keys, value={"quant_method": "guesswork"})
    line = refused(capsys, "--checkpoint", str(checkpoint))
    assert "quant_method" in line
    assert "guesswork" in line


def test_truncated_safetensors(checkpoint, capsys) -> None:
    file = min(checkpoint.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1000])
    assert file.name in refused(capsys, "--checkpoint", str(checkpoint))


def test_nan_weights(checkpoint, capsys) -> None:
    file = min(checkpoint.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(n for n, t in sorted(tensors.items()) if t.dtype == torch.bfloat16)
    tensors[name].view(-1)[7] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    line = refused(capsys, "--checkpoint", str(checkpoint))
    assert name in line
    assert "NaN" in line


def test_no_drafter(checkpoint, capsys) -> None:
    shutil.rmtree(checkpoint / "dspark")
    assert "drafter" in refused(capsys, "--checkpoint", str(checkpoint))


def test_no_such_checkpoint(tmp_path, capsys) -> None:
    assert "nowhere" in refused(capsys, "--checkpoint", str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected at least one prompt"),
        ("  \n\n", "expected at least one prompt"),
        ('{"ids": [1, 999]}\n', "line 1: expected tokens 0 to 259, got 999: not in the vocabulary"),
        ('good\n{"ids": [1, -1]}\n', "line 2: expected tokens 0 to 259, got -1"),
        ('{"ids": "abc"}\n', "line 1: expected `text` or a list of `ids`"),
        ('{"ids": [true]}\n', "line 1: expected `text` or a list of `ids`"),
        ('{"text"\n', "line 1: expected JSON"),
        ("a" * 3000 + "\n", "line 1: expected at most 2032 tokens within the context of 2048, got 3001"),
    ],
)
def test_prompts_that_cannot_be_used(tmp_path, capsys, text, says) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(text)
    assert says in refused(capsys, "--prompts", str(file))


def test_prompts_that_are_not_there_or_not_text(tmp_path, capsys) -> None:
    assert "prompts" in refused(capsys, "--prompts", str(tmp_path / "none.txt"))
    file = tmp_path / "latin"
    file.write_bytes(b"\xff\xfe\xff")
    assert "prompts" in refused(capsys, "--prompts", str(file))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--steps", "many"], "--steps"),
        (["--budget", "0"], "--budget: expected a rate between 0 and 1, got 0"),
        (["--modes", "local,psychic"], "--modes"),
        (["--widths", "8,12"], "--widths"),
        (["--widths", "16,8"], "--widths"),
        (["--prefix", "maybe"], "--prefix"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_options_that_cannot_be_used(capsys, arguments, says) -> None:
    assert says in refused(capsys, *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys) -> None:
    assert "--device: expected a GPU for cuda, there is none" in refused(capsys, "--device", "cuda")


def test_an_output_that_cannot_be_written_is_found_before_the_work(tmp_path, capsys, monkeypatch) -> None:
    def no_work(*_: object) -> None:
        raise AssertionError("the checkpoint was opened first")

    monkeypatch.setattr("audit.compare.open_subject", no_work)
    assert "cannot be written" in refused(capsys, "--json", str(tmp_path / "none" / "report.json"))
    assert "is a folder" in refused(capsys, "--json", str(tmp_path))


def test_a_failing_run_leaves_an_older_report_and_no_draft(tmp_path, capsys) -> None:
    report = tmp_path / "report.json"
    report.write_text("older")
    refused(capsys, "--json", str(report), "--checkpoint", str(tmp_path / "nowhere"))
    assert report.read_text() == "older"
    assert list(tmp_path.iterdir()) == [report]


def test_a_device_is_not_replaced_by_a_file(tmp_path, capsys) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "is a device or a pipe" in refused(capsys, "--json", str(pipe))
    assert pipe.is_fifo()


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = WholeFile(tmp_path / "report.json", "--json")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(Unusable, match=r"--json: .*report\.json: cannot be written: No space left"):
        file.write("{}")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_is_one_line_and_leaves_nothing(tmp_path, capsys, monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("audit.compare.gather", interrupted)
    assert main([*FAST, "--json", str(tmp_path / "report.json")]) == 130
    assert capsys.readouterr().err.strip() == "audit.compare: interrupted"
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_option_and_exit_code(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("--checkpoint", "--prompts", "--steps", "--budget", "--device", "--modes", "--widths",
                 "--prefix", "--seed", "--json", "0 pass, 1 fail, 2 inconclusive"):  # fmt: skip
        assert word in text


@pytest.mark.slow
def test_a_short_run_is_inconclusive_and_its_report_is_json(tmp_path, capsys) -> None:
    prompts = tmp_path / "prompts.txt"
    text = "Question: Mia owns 4 boxes of 23 shells. Later she loses 12 of them. How many shells has Mia now?"
    prompts.write_text(f"{text}\n{json.dumps(text.replace('Mia', 'Tom'))}\n{text}\n")
    report = tmp_path / "report.json"
    arguments = ["--steps", "6", "--modes", "local,shadow", "--prompts", str(prompts), "--json", str(report)]
    code = main([*FAST, *arguments])
    document = json.loads(report.read_text())
    assert document["schema"] == "mono-audit-compare/1"
    (run,) = document["runs"]
    assert code == run["exit_code"]
    assert run["verdict"] in ("inconclusive", "fail")
    assert "mode forced was not run" in run["reasons"] or any("width 8" in why for why in run["reasons"])
    assert run["steps"] == 6
    assert {slot["place"] for slot in run["slots"]} >= {"embed", "layer 3 (moe)", "head"}
    assert run["verdict"] in capsys.readouterr().out
