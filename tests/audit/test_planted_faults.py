"""Eight faults in a copy of the fast arm, on the embedded checkpoint: each fails, and at the right place.

The kernels are interpreted on the CPU, so the prompts are cut short, to just beyond what a selection keeps.
"""

from dataclasses import replace

import pytest
import torch

from audit.evidence import Evidence, Mode, gather
from audit.inputs import open_subject
from audit.plant import Fault, eight_faults
from audit.steps import Prompt, Schedule
from audit.tiny.problems import ordinary_prompts
from audit.verdict import Outcome, judge

pytestmark = pytest.mark.slow
CUT = 100  # tokens; a selection keeps 64

NAMES = [
    "nibbles of expert 3 swapped",
    "a scale byte of expert 5 off by 1",
    "SwiGLU clamp dropped",
    "RoPE position off by one",
    "last key of the tail block masked",
    "tap 6 taken one layer early",
    "correction bias used as weight",
    "a rejected draft's key kept",
]
MODE: dict[str, Mode] = {NAMES[5]: "shadow", NAMES[7]: "forced"}


@pytest.fixture(scope="module")
def opened():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    subject, candidate, _ = open_subject("m3.1", torch.device("cpu"), (8, 16), "reference")
    yield replace(subject, deployment=replace(subject.deployment, max_context=256)), candidate
    torch.set_num_threads(threads)


def faults(opened) -> dict[str, Fault]:
    subject, candidate = opened
    return {fault.name: fault for fault in eight_faults(candidate.assembly, subject.proposer.taps)}


def audited(opened, candidate, modes, steps: int = 12) -> Evidence:
    prompts = [Prompt(f"cut {i}", p.ids[-CUT:]) for i, p in enumerate(ordinary_prompts(6))]
    return gather(opened[0], candidate, prompts, Schedule(steps, 4, (0,)), modes)


def test_the_faults_are_the_eight(opened) -> None:
    assert list(faults(opened)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_fails_where_it_was_planted(opened, name) -> None:
    subject, candidate = opened
    fault = faults(opened)[name]
    broken = fault.plant(candidate, subject.weights)
    verdict = judge(audited(opened, broken, (MODE.get(name, "local"),)), budget=0.05)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.reasons[0].startswith(fault.place), verdict.reasons[:3]
    if name == NAMES[1]:
        (found,) = [found for found in verdict.slots if found.reasons]
        assert found.expert == 5


def test_the_intact_arm_raises_no_alarm(opened) -> None:
    verdict = judge(audited(opened, opened[1], ("local", "shadow", "forced")), budget=0.3)
    assert verdict.outcome is Outcome.PASS, verdict.reasons
