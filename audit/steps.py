"""Real decode steps: prompts decoded by the reference with its drafter, one verify step at a time.

The reference's tokens are the history. An arm that is *forced* lives beside it on the same tokens with caches
and draft contexts of its own, forked from the reference's when the audited part begins: as in serving, where
the prompt is always prefilled on the original path.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mono.assembly import Assembly
from mono.caches import LayerCache
from mono.decode import StepOutput, run
from mono.dspark.acceptance import accept_greedy
from mono.dspark.drafter import Proposer
from mono.dspark.generate import attention_specs, empty_caches
from mono.dspark.verify import verify_step
from mono.step import Step

MOST_ROUNDS = 48  # rounds of one prompt that its pages must hold
PREFILL_ROWS = 128  # rows of a prefill chunk: bounds the memory of the reference's attention


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, and a name that a report can print."""

    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which part of each prompt's decode is audited.

    steps:   verify steps wanted, one request's verify being one step.
    rounds:  consecutive steps of one prompt; more prompts are worth more than more rounds.
    depths:  rounds decoded before the audited part begins, one after the other for each group, so that
             steps lie early and late in a text.
    """

    steps: int
    rounds: int = 8
    depths: tuple[int, ...] = (0, 5, 2, 9, 14)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request's rows of a verify step come from.

    prompt: its number in the run. depth: rounds since the prompt. position: the anchor's.
    drafts: the reference drafter's.
    """

    prompt: int
    depth: int
    position: int
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """One verify step, ready to run: `step` is padded to the width it runs at."""

    step: Step
    places: tuple[Place, ...]

    @property
    def width(self) -> int:
        """Rows it runs at."""
        return self.step.rows

    @property
    def rows(self) -> int:
        """Rows that are not padding: they come first."""
        return len(self.places) * self.step.q_len


@dataclass
class History:
    """One arm's own past of the requests that are decoded together: caches, and what its drafter has read.

    taps: decoder layers this arm hands to the drafter.
    """

    assembly: Assembly
    proposer: Proposer
    taps: tuple[int, ...]
    caches: list[LayerCache]
    contexts: list[Any]

    def run(self, step: Step) -> StepOutput:
        """The whole step on this arm; its keys go into this history's caches."""
        return run(self.assembly, step, self.caches, self.taps)

    def keep(self, taps: Tensor, step: VerifyStep, accepted: Sequence[int]) -> None:
        """Hand rows 0 to A of each request to the drafter; the others read a rejected token."""
        q = step.step.q_len
        for r, (place, count) in enumerate(zip(step.places, accepted, strict=True)):
            self.proposer.write_context(
                self.contexts[r], taps[r * q : r * q + count + 1].contiguous(), place.position
            )

    def propose(self, anchors: Sequence[int], positions: Sequence[int]) -> list[tuple[int, ...]]:
        """This arm's drafts for each request."""
        if not anchors:
            return []
        device = self.assembly.device
        at = torch.tensor(anchors, device=device), torch.tensor(positions, device=device)
        return [tuple(row) for row in self.proposer.propose(self.contexts, *at).drafts.tolist()]

    def fork(
        self, assembly: Assembly, taps: tuple[int, ...] | None = None, into: type[History] | None = None
    ) -> History:
        """The same past in memory of its own, continued by another arm.

        taps: the layers this arm taps, where they are not the same. into: a past that behaves otherwise.
        """
        return (into or History)(
            assembly,
            self.proposer,
            self.taps if taps is None else taps,
            [cache.clone() for cache in self.caches],
            copy.deepcopy(self.contexts),
        )


@dataclass(slots=True)
class _Request:
    prompt: int
    position: int  # the anchor's
    anchor: int
    drafts: tuple[int, ...]
    depth: int
    live: bool = True


class Session:
    """Some prompts decoded together on the reference."""

    def __init__(
        self,
        reference: Assembly,
        proposer: Proposer,
        prompts: Sequence[tuple[int, Prompt]],
        widths: Sequence[int],
        max_context: int,
        stop: frozenset[int],
        seed: int,
        prefill_rows: int = PREFILL_ROWS,
    ) -> None:
        """Prefill the prompts and draft their first block.

        prompts:  number and prompt. stop: tokens that end a text.
        Pages are dealt in a shuffled order, so that no arm can live on pages that happen to be in order.
        """
        device = reference.device
        self.block_size = attention_specs(reference.plan)[0].block_size
        self.q_len, self.prefill_rows = proposer.block + 1, prefill_rows
        self.widths, self.stop = tuple(widths), stop
        longest = max(len(prompt.ids) for _, prompt in prompts)
        # a page for every position a request may reach, and no more: the reference gathers whole tables
        room = min(max_context, longest + MOST_ROUNDS * self.q_len)
        table = -(-(room + self.q_len) // self.block_size)
        self.room = room
        order = torch.randperm(table * len(prompts), generator=torch.Generator().manual_seed(seed))
        self.tables = order.view(len(prompts), table).int().to(device)
        caches = empty_caches(reference.plan, table * len(prompts), device)
        contexts = [proposer.new_context(table * self.block_size) for _ in prompts]
        self.history = History(reference, proposer, tuple(proposer.taps), caches, contexts)
        self.requests = [
            _Request(number, len(prompt.ids), self._prefill(r, prompt.ids), (), 0)
            for r, (number, prompt) in enumerate(prompts)
        ]
        for request in self.requests:
            request.live = request.anchor not in stop
        self._retire([self.history])
        self._draft()

    def _prefill(self, r: int, ids: Sequence[int]) -> int:
        history, device = self.history, self.history.assembly.device
        for start in range(0, len(ids), self.prefill_rows):
            chunk = torch.tensor([list(ids[start : start + self.prefill_rows])], device=device)
            end = torch.tensor([start + chunk.shape[1]], dtype=torch.int32, device=device)
            output = history.run(Step.of(chunk, end, self.tables[r : r + 1], self.block_size))
            history.proposer.write_context(history.contexts[r], output.taps, start)
        return int(output.top1[-1])

    def next(self) -> VerifyStep | None:
        """The next verify step, padded to the smallest width that holds it; None if no text goes on."""
        if not self.requests:
            return None
        device = self.history.assembly.device
        step = verify_step(
            torch.tensor([request.anchor for request in self.requests], device=device),
            torch.tensor([request.drafts for request in self.requests], device=device),
            torch.tensor([request.position for request in self.requests], device=device),
            self.tables,
            self.block_size,
        )
        width = next(w for w in self.widths if w >= step.rows)
        places = tuple(Place(r.prompt, r.depth, r.position, r.drafts) for r in self.requests)
        return VerifyStep(step.padded_to(width), places)

    def commit(
        self, step: VerifyStep, output: StepOutput, forced: Sequence[tuple[History, StepOutput]] = ()
    ) -> Committed:
        """Accept on the reference's top-1 and move every request on.

        forced: histories that ran `step` themselves, with what came out: each hands its own taps of the
                accepted rows to its own draft contexts.
        """
        accepted, emitted = accept_step(step, output.top1)
        self.history.keep(output.taps, step, accepted)
        for history, own in forced:
            history.keep(own.taps, step, accepted)
        for request, tokens in zip(self.requests, emitted, strict=True):
            request.position += len(tokens)
            request.anchor = tokens[-1]
            request.depth += 1
            request.live = not self.stop.intersection(tokens)
        self._retire([self.history, *(history for history, _ in forced)])
        self._draft()
        return Committed(accepted, emitted)

    def draft_on(self, history: History) -> list[tuple[int, ...]]:
        """Another history's drafts for the requests as they now stand; they are compared, never verified."""
        return history.propose([r.anchor for r in self.requests], [r.position for r in self.requests])

    def _draft(self) -> None:
        for request, block in zip(self.requests, self.draft_on(self.history), strict=True):
            request.drafts = block

    def _retire(self, histories: Sequence[History]) -> None:
        for request in self.requests:
            request.live &= request.position + self.q_len <= self.room
        keep = [request.live for request in self.requests]
        for history in histories:
            history.contexts = [c for c, stays in zip(history.contexts, keep, strict=True) if stays]
        self.tables = self.tables[torch.tensor(keep, dtype=torch.bool, device=self.tables.device)]
        self.requests = [request for request in self.requests if request.live]


@dataclass(frozen=True, slots=True)
class Committed:
    """What the reference decided for each request of a step."""

    accepted: tuple[int, ...]
    emitted: tuple[tuple[int, ...], ...]


def accept_step(step: VerifyStep, top1: Tensor) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Accepted length and emitted tokens of each request, from the top-1 of the step's rows."""
    rows = top1[: step.rows].view(len(step.places), step.step.q_len).cpu()
    drafts = torch.tensor([place.drafts for place in step.places])
    found = accept_greedy(drafts, rows)
    accepted = tuple(found.accepted.tolist())
    emitted = tuple(tuple(row[: a + 1]) for row, a in zip(found.emitted.tolist(), accepted, strict=True))
    return accepted, emitted


def groups(
    widths: Sequence[int], q_len: int, prompts: int, schedule: Schedule
) -> Iterator[tuple[range, int]]:
    """Which prompts are decoded together, and how deep their audited part begins.

    Group sizes go round over the widths, largest first, so that every width is visited early.
    """
    sizes = [width // q_len for width in sorted(widths, reverse=True) if width >= q_len]
    start = turn = 0
    while start < prompts:
        size = min(sizes[turn % len(sizes)], prompts - start)
        yield range(start, start + size), schedule.depths[turn % len(schedule.depths)]
        start, turn = start + size, turn + 1
