"""A passing run is certified, the certificate opens the door, and nothing else does."""

from pathlib import Path

import pytest

from audit.compare import main
from audit.inputs import EMBEDDED
from mono import Bound, Deployment, Refused, bind
from mono.certificate import read
from mono.models import load_model

KEY = b"an operator's key of many bytes"


@pytest.mark.slow
def test_a_short_passing_run_binds_what_it_saw(tmp_path: Path) -> None:
    key, path = tmp_path / "key", tmp_path / "certificate.json"
    key.write_bytes(KEY)
    run = ["--checkpoint", "m3", "--device", "cpu", "--steps", "10", "--budget", "0.4"]
    assert main([*run, "--certificate", str(path), "--sign-key", str(key), "--days", "30"]) == 0
    certificate = read(path, KEY)
    longest = certificate.facts.max_context
    assert certificate.evidence.steps >= 10
    assert certificate.evidence.longest == longest

    deployment = Deployment(max_context=longest // 16 * 16)
    model = load_model(EMBEDDED["m3"], deployment)
    assert isinstance(bind(model, deployment, path, key=KEY), Bound)
    assert isinstance(bind(model, deployment, path, key=KEY[::-1]), Refused)
    longer = Deployment(max_context=longest // 16 * 16 + 16)
    refused = bind(load_model(EMBEDDED["m3"], longer), longer, path, key=KEY)
    assert "max_context" in str(refused)
    other = bind(load_model(EMBEDDED["m3.1"], deployment), deployment, path, key=KEY)
    assert "certificate: checkpoint" in str(other)


@pytest.mark.slow
def test_an_inconclusive_run_writes_no_certificate(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    run = ["--checkpoint", "m3", "--device", "cpu", "--steps", "2", "--budget", "0.01", "--modes", "local"]
    assert main([*run, "--certificate", str(path)]) != 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--checkpoint", "all", "--certificate", "c.json"], "for one checkpoint"),
        (["--sign-key", "key"], "expected --certificate"),
        (["--certificate", "c.json", "--days", "0"], "--days: expected 1 to 366, got 0"),
        (["--certificate", "c.json", "--sign-key", "no such key"], "--sign-key: no such key: cannot be read"),
        (["--certificate", "."], "--certificate: expected a file, . is a folder"),
    ],
)
def test_unusable_options_are_one_line(options, says, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--device", "cpu", *options]) == 3
    assert says in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())
