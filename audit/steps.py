"""Real decode steps: prompts decoded by the reference with its drafter, one verify step at a time.

The reference's tokens are the history. An arm that is *forced* lives beside it on the same tokens with caches
and draft contexts of its own, forked from the reference's when the audited part begins: as in serving, where
the prompt is always prefilled on the original path.

Many requests are verified together, which is what makes a slow reference bearable. The fast arm runs them in
*parts*: steps of exactly the widths that it is built for, as serving would.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, and a name that a report can print."""

    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which part of each prompt's decode is audited, and how much is done at once.

    steps:         verify steps wanted, one request's verify being one step.
    rounds:        consecutive steps of one prompt; more prompts are worth more than more rounds.
    depths:        rounds decoded before the audited part begins, for one prompt after the other, so that
                   steps lie early and late in a text.
    together:      prompts decoded together. prefill_rows: rows of a prefill chunk. Both bound the memory.
    """

    steps: int
    rounds: int = 8
    depths: tuple[int, ...] = (0, 5, 2, 9, 14)
    together: int = 8
    prefill_rows: int = 128


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
class Part:
    """Rows `start` to `stop` of a verify step, as a step padded to a width that the fast arm is built for."""

    start: int
    stop: int
    step: Step

    @property
    def rows(self) -> int:
        """Rows that are not padding."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """One verify step of all requests, and the parts that the fast arm runs it in."""

    step: Step
    places: tuple[Place, ...]
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """Rows, none of them padding."""
        return self.step.rows


def run_in_parts(
    assembly: Assembly, step: VerifyStep, caches: Sequence[LayerCache], taps: Sequence[int]
) -> StepOutput:
    """The whole step, part after part, padding rows dropped."""
    outputs = [(part.rows, run(assembly, part.step, caches, taps)) for part in step.parts]
    return StepOutput(
        torch.cat([output.logits[:rows] for rows, output in outputs]),
        torch.cat([output.top1[:rows] for rows, output in outputs]),
        torch.cat([output.taps[:rows] for rows, output in outputs]),
    )


@dataclass
class History:
    """One arm's own past of the requests that are decoded together: caches, and what its drafter has read.

    taps:      decoder layers this arm hands to the drafter.
    contexts:  the drafter's, by number of the prompt.
    in_parts:  whether it runs a step in parts.
    """

    assembly: Assembly
    proposer: Proposer
    taps: tuple[int, ...]
    caches: list[LayerCache]
    contexts: dict[int, Any]
    in_parts: bool = False

    def run(self, step: VerifyStep) -> StepOutput:
        """The whole step on this arm; its keys go into this history's caches."""
        if self.in_parts:
            return run_in_parts(self.assembly, step, self.caches, self.taps)
        return run(self.assembly, step.step, self.caches, self.taps)

    def keep(self, taps: Tensor, step: VerifyStep, accepted: Sequence[int]) -> None:
        """Hand rows 0 to A of each request to the drafter; the others read a rejected token."""
        q = step.step.q_len
        for r, (place, count) in enumerate(zip(step.places, accepted, strict=True)):
            rows = taps[r * q : r * q + count + 1].contiguous()
            self.proposer.write_context(self.contexts[place.prompt], rows, place.position)

    def propose(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """This arm's drafts for each request."""
        if not requests:
            return []
        device = self.assembly.device
        contexts = [self.contexts[request.prompt] for request in requests]
        anchors = torch.tensor([request.anchor for request in requests], device=device)
        positions = torch.tensor([request.position for request in requests], device=device)
        drafts = self.proposer.propose(contexts, anchors, positions).drafts.tolist()
        return [tuple(block) for block in drafts]

    def fork(
        self,
        assembly: Assembly,
        taps: tuple[int, ...] | None = None,
        into: type[History] | None = None,
        in_parts: bool = False,
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
            in_parts,
        )


@dataclass(slots=True, eq=False)
class Request:
    """One prompt's state: where its anchor stands, what is drafted behind it, and its pages."""

    prompt: int
    table: Tensor
    position: int
    anchor: int
    drafts: tuple[int, ...] = ()
    depth: int = 0


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
        prefill_rows: int,
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
        self.room = min(max_context, longest + MOST_ROUNDS * self.q_len)
        pages = -(-(self.room + self.q_len) // self.block_size)
        order = torch.randperm(pages * len(prompts), generator=torch.Generator().manual_seed(seed))
        tables = order.view(len(prompts), pages).int().to(device)
        caches = empty_caches(reference.plan, pages * len(prompts), device)
        contexts = {number: proposer.new_context(pages * self.block_size) for number, _ in prompts}
        self.history = History(reference, proposer, tuple(proposer.taps), caches, contexts)
        started = [
            Request(number, table, len(prompt.ids), self._prefill(number, prompt.ids, table))
            for (number, prompt), table in zip(prompts, tables, strict=True)
        ]
        self.requests = [r for r in started if r.anchor not in stop and self._fits(r)]
        self._draft(self.requests)

    def _prefill(self, number: int, ids: Sequence[int], table: Tensor) -> int:
        history, device = self.history, self.history.assembly.device
        for start in range(0, len(ids), self.prefill_rows):
            chunk = torch.tensor([list(ids[start : start + self.prefill_rows])], device=device)
            end = torch.tensor([start + chunk.shape[1]], dtype=torch.int32, device=device)
            step = Step.of(chunk, end, table[None], self.block_size)
            output = run(history.assembly, step, history.caches, history.taps)
            history.proposer.write_context(history.contexts[number], output.taps, start)
        return int(output.top1[-1])

    def advance(self, depths: Mapping[int, int]) -> None:
        """Decode each request to a depth, given by number of its prompt; nothing is audited."""
        while going := [r for r in self.requests if depths.get(r.prompt, 0) > r.depth]:
            step = self.next(going)
            assert step is not None  # some request goes on
            self.commit(step, self.history.run(step))

    def next(self, requests: Sequence[Request] | None = None) -> VerifyStep | None:
        """The next verify step of these requests, else of all; None if no text goes on."""
        chosen = self.requests if requests is None else list(requests)
        if not chosen:
            return None
        places = tuple(Place(r.prompt, r.depth, r.position, r.drafts) for r in chosen)
        return VerifyStep(self._step(chosen), places, tuple(self._parts(chosen)))

    def _step(self, requests: Sequence[Request]) -> Step:
        device = self.history.assembly.device
        # the reference gathers whole tables, so they end where the longest request does
        pages = -(-(max(request.position for request in requests) + self.q_len) // self.block_size)
        return verify_step(
            torch.tensor([request.anchor for request in requests], device=device),
            torch.tensor([request.drafts for request in requests], device=device),
            torch.tensor([request.position for request in requests], device=device),
            torch.stack([request.table[:pages] for request in requests]),
            self.block_size,
        )

    def _parts(self, requests: Sequence[Request]) -> list[Part]:
        """Requests by turns at every width that holds one, the largest first."""
        widths = [width for width in sorted(self.widths, reverse=True) if width >= self.q_len]
        parts: list[Part] = []
        start = 0
        while start < len(requests):
            some = requests[start : start + widths[len(parts) % len(widths)] // self.q_len]
            step = self._step(some)
            width = min(width for width in widths if width >= step.rows)
            parts.append(Part(start * self.q_len, start * self.q_len + step.rows, step.padded_to(width)))
            start += len(some)
        return parts

    def commit(
        self, step: VerifyStep, output: StepOutput, forced: Sequence[tuple[History, StepOutput]] = ()
    ) -> Committed:
        """Accept on the reference's top-1 and move the step's requests on.

        forced: histories that ran `step` themselves, with what came out: each hands its own taps of the
                accepted rows to its own draft contexts.
        """
        committed = accept_step(step, output.top1)
        self.history.keep(output.taps, step, committed.accepted)
        for history, own in forced:
            history.keep(own.taps, step, committed.accepted)
        by_prompt = {request.prompt: request for request in self.requests}
        moved = [by_prompt[place.prompt] for place in step.places]
        for request, tokens in zip(moved, committed.emitted, strict=True):
            request.position += len(tokens)
            request.anchor = tokens[-1]
            request.depth += 1
            if self.stop.intersection(tokens) or not self._fits(request):
                self.requests.remove(request)
        self._draft([request for request in moved if request in self.requests])
        return committed

    def _draft(self, requests: Sequence[Request]) -> None:
        for request, block in zip(requests, self.history.propose(requests), strict=True):
            request.drafts = block

    def _fits(self, request: Request) -> bool:
        return request.position + self.q_len <= self.room


@dataclass(frozen=True, slots=True)
class Committed:
    """What the reference decided for each request of a step."""

    accepted: tuple[int, ...]
    emitted: tuple[tuple[int, ...], ...]


def accept_step(step: VerifyStep, top1: Tensor) -> Committed:
    """Accepted length and emitted tokens of each request, from the top-1 of the step's rows."""
    rows = top1.view(len(step.places), step.step.q_len).cpu()
    found = accept_greedy(torch.tensor([place.drafts for place in step.places]), rows)
    accepted = tuple(found.accepted.tolist())
    emitted = zip(found.emitted.tolist(), accepted, strict=True)
    return Committed(accepted, tuple(tuple(tokens[: a + 1]) for tokens, a in emitted))
