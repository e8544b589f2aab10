"""Speculative greedy output is plain greedy output, token for token, on both embedded checkpoints.

Plain steps hold 16 requests and verify steps two, so both fill one tile of 16 rows, in which a row's sums
have one order (decision 0004). Any token that differs is then a fault of drafting, verify, acceptance or
rewind.
"""

from pathlib import Path
from random import Random

import pytest
import torch

from audit.tiny import quality
from audit.tiny.problems import Problem, problem
from audit.tiny.tokens import BOS, EOS, encode
from mono.deployment import Deployment
from mono.dspark.generate import generate
from mono.models import load_model

PROMPTS, NEW, CONTEXT = 100, 28, 320
TINY = Path(quality.__file__).parent


def prompt(one: Problem) -> list[int]:
    """The question alone, up to where its answer begins."""
    return [BOS, *encode(f"{one.question}Answer:")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m3", "m3.1"])
def test_token_for_token(name: str) -> None:
    torch.set_num_threads(1)
    deployment = Deployment(max_context=CONTEXT)
    model = load_model(TINY / name, deployment)
    assembly, drafter = quality.build(model, deployment, model.plan, "cpu")
    rng = Random(7)
    prompts = [prompt(problem(rng, "test")) for _ in range(PROMPTS)]
    assert min(len(p) for p in prompts) > model.plan.keys_before_selection  # else no selection is exercised
    plain = generate(assembly, prompts, NEW, CONTEXT, max_requests=16, stop=(EOS,))
    spec = generate(assembly, prompts, NEW, CONTEXT, drafter, max_requests=2, stop=(EOS,))
    accepted = [a for g in spec for a in g.accepted]
    assert min(accepted) == 0  # both whole rejections and whole acceptances took part
    assert max(accepted) == 7
    differ = [i for i, (a, b) in enumerate(zip(plain, spec, strict=True)) if a.tokens != b.tokens]
    assert not differ, f"prompts {differ}"
