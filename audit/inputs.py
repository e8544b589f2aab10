"""What a comparison is run on: a checkpoint, its drafter, prompts. What is unusable is one clear line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from audit.evidence import Subject
from audit.steps import Prompt
from audit.tiny import problems, tokens
from audit.whole import Candidate
from mono.assembly import assemble
from mono.checkpoint import load_checkpoint
from mono.deployment import Deployment, Prefix
from mono.dspark.drafter import load_drafter
from mono.dspark.verify import refuse_verify
from mono.layers import embed, head
from mono.models import Model, load_model
from mono.refusal import Refused

EMBEDDED = {name: Path(__file__).parent / "tiny" / name for name in ("m3", "m3.1")}


class Unusable(ValueError):
    """Input that nothing can be said about. The message names the field, what was expected and what came."""


def open_subject(
    name: str, device: torch.device, widths: tuple[int, ...], prefix: Prefix
) -> tuple[Subject, Candidate, Model]:
    """Load a checkpoint with its drafter, and build the fast arm that is to be compared.

    name:    `m3` or `m3.1` for an embedded checkpoint, else the path of a folder.
    Errors:  Unusable for whatever is wrong with any of them.
    """
    path = EMBEDDED.get(name, Path(name))
    if not path.is_dir():
        raise Unusable(f"checkpoint: expected {', '.join(EMBEDDED)} or a folder, got {name}")
    try:
        checkpoint = load_checkpoint(path)
        drafter = checkpoint.drafter()
        if drafter is None:
            raise Unusable(f"checkpoint: {path}: expected a drafter in dspark/, there is none")
        limit = checkpoint.text_config.get("max_position_embeddings")
        if not isinstance(limit, int) or limit < 1:
            raise Unusable(f"checkpoint: {path}: max_position_embeddings: expected a number, got {limit!r}")
        deployment = Deployment(max_context=limit, widths=widths, prefix=prefix)
        model = load_model(checkpoint, deployment, device)
        table, last = model.weights[0], model.weights[-1]
        assert isinstance(table, embed.Weights)  # a plan begins with the embedding
        assert isinstance(last, head.Weights)  # and ends in the head
        vocab = _vocab(model.plan.slots[0].spec)
        proposer = load_drafter(drafter, table.table, last.head, device, limit + 1, vocab)
        if reasons := refuse_verify(deployment, proposer.spec):
            raise Unusable(f"deployment: {'; '.join(reasons)}")
        fast = assemble(model.plan, model.weights, deployment, "fast")
    except Unusable:
        raise
    except (ValueError, OSError) as error:
        raise Unusable(f"checkpoint: {_line(error)}") from error
    if isinstance(fast, Refused):
        raise Unusable(f"checkpoint: {path}: the fast arm refuses it: {fast}")
    eos = checkpoint.text_config.get("eos_token_id")
    stop = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
    subject = Subject(name, model.plan, model.weights, deployment, proposer, stop)
    return subject, Candidate(fast, tuple(proposer.taps)), model


def _vocab(spec: Any) -> int:
    assert isinstance(spec, embed.Spec)
    return spec.vocab


def embedded_prompts(count: int, seed: int) -> list[Prompt]:
    """Prompts of the embedded sets in turn: ordinary ones, open ones with small margins, long contexts."""
    sets = {
        "ordinary": problems.ordinary_prompts(-(-count // 2), seed),
        "open": problems.open_prompts(-(-count // 4), seed),
        "long": problems.long_prompts(-(-count // 4), seed),
    }
    order = ("ordinary", "open", "ordinary", "long")
    taken = {name: iter(enumerate(prompts)) for name, prompts in sets.items()}
    chosen = []
    for number in range(count):
        name = order[number % 4]
        index, prompt = next(taken[name])
        chosen.append(Prompt(f"{name} {index}", prompt.ids))
    return chosen


def read_prompts(path: Path) -> list[tuple[str, str | list[int]]]:
    """Named prompts of a file, one a line: text, or JSON, a string or an object of `text` or `ids`.

    Errors:  Unusable for a file that cannot be read, holds no prompt, or a line that is not one of these.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Unusable(f"prompts: {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Unusable(f"prompts: {path}: expected UTF-8, got {_line(error)}") from error
    found: list[tuple[str, str | list[int]]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            found.append((f"line {number}", _prompt(f"prompts: {path}: line {number}", line)))
    if not found:
        raise Unusable(f"prompts: {path}: expected at least one prompt, there is none")
    return found


def _prompt(where: str, line: str) -> str | list[int]:
    if not line.lstrip().startswith(("{", '"')):
        return line
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise Unusable(f"{where}: expected JSON, got {_line(error)}") from error
    text, ids = (value.get("text"), value.get("ids")) if isinstance(value, dict) else (value, None)
    if isinstance(text, str) and ids is None:
        return text
    if text is None and isinstance(ids, list) and ids and all(type(token) is int for token in ids):
        return ids
    raise Unusable(f"{where}: expected `text` or a list of `ids`, got {line.strip():.60}")


def as_prompts(found: Sequence[tuple[str, str | list[int]]], subject: Subject, where: str) -> list[Prompt]:
    """Prompts as tokens of the subject's vocabulary. Text is its UTF-8 bytes after BOS.

    Errors:  Unusable for a token outside the vocabulary, text where the vocabulary is not bytes, or a prompt
             that leaves no room for a verify step within the context limit.
    """
    prompts = []
    for name, value in found:
        if isinstance(value, str):
            if subject.vocab > tokens.TOKENS:
                raise Unusable(
                    f"{where}: {name}: expected token `ids`: text is read as bytes, and the vocabulary has"
                    f" {subject.vocab} tokens"
                )
            ids = tokens.encode(value)
            if subject.vocab > tokens.BOS:
                ids = [tokens.BOS, *ids]
        else:
            ids = value
        for token in ids:
            if not 0 <= token < subject.vocab:
                raise Unusable(
                    f"{where}: {name}: expected tokens 0 to {subject.vocab - 1}, got {token}: not in the"
                    " vocabulary"
                )
        limit = subject.deployment.max_context - 2 * subject.deployment.q_len
        if len(ids) > limit:
            raise Unusable(
                f"{where}: {name}: expected at most {limit} tokens within the context of"
                f" {subject.deployment.max_context}, got {len(ids)}"
            )
        prompts.append(Prompt(name, tuple(ids)))
    return prompts


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
