"""The page: it fits a terminal, and says what a verdict rests on."""

from dataclasses import replace
from io import StringIO

import pytest
import random_model as rm
import torch
from rich.console import Console

from audit import report
from audit.evidence import Evidence
from audit.floor import Judged
from audit.plant import with_layer
from audit.report import as_json, show
from audit.verdict import judge


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seen = rm.run(rm.candidate(), steps=16)
    torch.set_num_threads(threads)
    return seen


def page(evidence: Evidence, width: int) -> str:
    out = StringIO()
    show(Console(file=out, width=width), evidence, judge(evidence, 0.2), torch.device("cpu"), 0)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_off(evidence, width) -> None:
    text = page(evidence, width)
    assert "\u2026" not in text
    assert max(map(len, text.splitlines())) <= width
    for words in ("random: pass", "x floor", "every rule holds", "16 verify steps", "ties", "not tested"):
        assert words in text


def test_the_widest_row_fits_eighty_columns(evidence) -> None:
    narrow: Judged = judge(evidence, 0.2).whole[0]
    big = {"worst": 1.5e-30, "row_floor": 1.5e-30, "ratio": 1e30, "mean_ratio": 123456.7, "explained": 12345}
    wide = replace(narrow, place="layer 59 (sparse_attention): own cache", output="index_k", **big)
    out = StringIO()
    Console(file=out, width=80).print(report._slots("whole steps", [wide]))
    assert "layer 59 (sparse_attention) own index_k" in out.getvalue()
    for words in ("1.5e-30", "1.0e+30", "1.2e+05", "12345"):
        assert words in out.getvalue()


def test_a_row_and_its_floor_are_those_of_the_ratio(evidence) -> None:
    for found in judge(evidence, 0.2).slots:
        assert found.row_floor >= found.floor
        assert found.ratio == pytest.approx(found.worst / found.row_floor if found.worst else 0.0)


def test_a_run_that_broke_off_at_once_still_has_a_page() -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no kernel image")

    index = rm.PLAN.slots.index(next(s for s in rm.PLAN.slots if s.kind == "moe"))
    evidence = rm.run(with_layer(rm.candidate(), index, broken), steps=2)
    text = page(evidence, 200)
    assert "random: fail" in text
    assert "layer 1 (moe): the fast arm raised RuntimeError: no kernel image" in text
    run = show(Console(file=StringIO()), evidence, judge(evidence, 0.2), torch.device("cpu"), 0)
    assert run["exit_code"] == 1
    assert run["reasons"][0] in as_json([run])
