"""The decode loop: plain greedy decode, or speculative rounds with a drafter, over paged caches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from mono.assembly import Assembly
from mono.caches import LayerCache, PagePool
from mono.decode import StepOutput, run
from mono.dspark.acceptance import (
    Acceptance,
    Synthetic,
    SyntheticSchedule,
    accept_greedy,
    keyed_uniforms,
)
from mono.dspark.drafter import Proposal, Proposer
from mono.dspark.taps import Taps
from mono.dspark.verify import verify_step
from mono.layers import dense_attention, head, sparse_attention
from mono.layers.checks import check_cache
from mono.plan import Plan
from mono.step import Step

Reason = Literal["stop", "length"]
RunStep = Callable[[Step], StepOutput]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One decode or verify step as the loop saw it, told after acceptance and before the hand-over.

    step:       the step that ran. Running it again rewrites the same cache slots with the same keys.
    requests:   number of each request in the step, by place among the prompts.
    positions:  [B], P, position of each request's anchor.
    proposal:   the drafter's block; None in plain decode.
    output:     logits, top-1 and taps of the step's rows.
    acceptance: what was decided, before any cut. Plain decode accepts nothing and emits the top-1.
    delivered:  tokens of each request that were kept: fewer than emitted where a stop or the length cut them.
    """

    step: Step
    requests: tuple[int, ...]
    positions: tuple[int, ...]
    proposal: Proposal | None
    output: StepOutput
    acceptance: Acceptance | Synthetic
    delivered: tuple[tuple[int, ...], ...]

    @property
    def drafts(self) -> Tensor | None:
        """[B, draft_len] int64, or None in plain decode."""
        return None if self.proposal is None else self.proposal.drafts


@dataclass(frozen=True, slots=True)
class Generated:
    """What one prompt became.

    tokens:           new tokens, a stop token included.
    reason:           `stop`, or `length`.
    accepted:         A of each of its verify rounds, before any cut.
    performance_only: True after forced acceptance: the tokens are then not the model's.
    """

    tokens: tuple[int, ...]
    reason: Reason
    accepted: tuple[int, ...]
    performance_only: bool


@dataclass(slots=True)
class _Request:
    """A request in the batch. Everything it owns is here, whatever row it stands in."""

    number: int
    prompt: list[int]
    max_new: int
    context: Any = None  # the drafter's
    pages: list[int] = field(default_factory=list)
    position: int = 0  # P, of the anchor
    anchor: int = 0
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    reason: Reason | None = None


def attention_specs(plan: Plan) -> list[dense_attention.Spec | sparse_attention.Spec]:
    """The attention spec of each decoder layer, in order."""
    kinds = (dense_attention.Spec, sparse_attention.Spec)
    return [slot.spec for slot in plan.slots if isinstance(slot.spec, kinds)]


def empty_caches(
    plan: Plan, pages: int, device: torch.device | str = "cpu", kv_format: str = "fp8_e4m3"
) -> list[LayerCache]:
    """One cache of `pages` pages for each decoder layer; index keys where the layer selects."""
    return [
        LayerCache.empty(
            pages,
            s.block_size,
            s.kv_heads,
            s.head_dim,
            s.index_dim if isinstance(s, sparse_attention.Spec) and s.selects else None,
            device,
            kv_format,
        )
        for s in attention_specs(plan)
    ]


class Generator:
    """Greedy generation for many prompts, a few at a time.

    A round, for every request in the batch: take the pages that positions P .. P + draft_len need; propose;
    verify; accept; cut at a stop token or the length; hand over. Handing over moves the anchor to P + A + 1,
    and gives the drafter the taps of rows 0 to A, which are the rows of committed tokens. Rows behind A have
    read a rejected token: their taps are never read, their keys are overwritten before any row sees them
    (`verify_step`), so nothing is rolled back. Without a drafter a round is one row a request.

    A prompt is prefilled alone, in chunks of `prefill_rows`; its last row's top-1 is the first new token and
    the first anchor. A finished request leaves the batch at once and gives its pages back; the next prompt
    joins before the next round. Requests join in order, so a run is deterministic, and what one becomes
    depends on no other: block tables have one width, and all that a request owns goes by its number.

    assembly:      the target; prefills, and decodes unless `decode` is given.
    caches, pool:  one cache for each decoder layer, and the pages they share.
    max_context:   positions a request may reach; a verify step reaches draft_len past its anchor.
    drafter:       None for plain decode.
    stop:          token ids that end a request, and are its last token.
    decode:        runs decode and verify steps in place of `assembly`; it yields the drafter's taps too.
    width:         if given, decode and verify steps are padded to a multiple of this many rows.
    synthetic:     forces acceptance; what comes out is marked performance only.
    on_step:       is told every decode and verify step.
    """

    def __init__(
        self,
        assembly: Assembly,
        caches: Sequence[LayerCache],
        pool: PagePool,
        max_context: int,
        drafter: Proposer | None = None,
        *,
        max_requests: int = 1,
        prefill_rows: int = 512,
        stop: Collection[int] = (),
        decode: RunStep | None = None,
        width: int | None = None,
        synthetic: SyntheticSchedule | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        """Errors: ValueError for sizes below 1 or beyond what is served, caches that are not the plan's, the
        deployment's and the pool's, a width, taps or a schedule that do not fit."""
        plan, served = assembly.plan, assembly.deployment
        for name, size in (
            ("max_context", max_context),
            ("max_requests", max_requests),
            ("prefill_rows", prefill_rows),
        ):
            if size < 1:
                raise ValueError(f"generate: {name}: expected at least 1, got {size}")
        if max_context > served.max_context:
            raise ValueError(
                f"generate: max_context: expected at most {served.max_context}, the deployment's,"
                f" got {max_context}"
            )
        specs = attention_specs(plan)
        if len(caches) != plan.layers or len({s.block_size for s in specs}) != 1:
            raise ValueError(
                f"generate: caches: expected {plan.layers} of one block size, the plan's, got {len(caches)}"
            )
        for layer, (spec, cache) in enumerate(zip(specs, caches, strict=True)):
            check_cache(f"generate: layer {layer}", spec, cache)
            if cache.kv_format != served.kv_format or cache.pages < pool.pages:
                raise ValueError(
                    f"generate: layer {layer}: cache: expected {pool.pages} pages in {served.kv_format},"
                    f" got {cache.pages} in {cache.kv_format}"
                )
        last = plan.slots[-1].spec
        assert isinstance(last, head.Spec)  # a plan ends in a head
        if drafter is not None and drafter.vocab != last.vocab:
            raise ValueError(
                f"generate: drafter: expected the target's vocabulary of {last.vocab}, got {drafter.vocab}"
            )
        self.draft_len = 0 if drafter is None else drafter.block
        if width is not None and (width < 1 or width % (1 + self.draft_len)):
            raise ValueError(
                f"generate: width: expected a multiple of {1 + self.draft_len} rows a request, got {width}"
            )
        if synthetic is not None and (drafter is None or synthetic.draft_len != self.draft_len):
            raise ValueError(
                f"generate: synthetic acceptance of {synthetic.draft_len} drafts needs a drafter of that"
                f" block, got {'none' if drafter is None else self.draft_len}"
            )
        self.assembly = assembly
        self.caches = caches
        self.pool = pool
        self.max_context = max_context
        self.drafter = drafter
        self.max_requests = max_requests
        self.prefill_rows = prefill_rows
        self.stop = frozenset(stop)
        self.width = width
        self.synthetic = synthetic
        self.on_step = on_step
        self.vocab = last.vocab
        self.block_size = specs[0].block_size
        self.table_width = -(-max_context // self.block_size)
        self.taps = (
            None
            if drafter is None
            else Taps.empty(
                drafter.taps,
                plan.layers,
                assembly.hidden,
                max(prefill_rows, max_requests * (1 + self.draft_len)),
                assembly.device,
            )
        )
        ids = () if drafter is None else drafter.taps

        def run_assembly(step: Step) -> StepOutput:
            return run(assembly, step, caches, ids)

        self._prefill: RunStep = run_assembly
        self._decode: RunStep = decode or run_assembly

    def __call__(self, prompts: Sequence[Sequence[int]], max_new: int | Sequence[int]) -> list[Generated]:
        """Generate up to `max_new` tokens after each prompt.

        Errors:  ValueError naming the request, before anything is run or taken: an empty prompt, a token
                 outside the vocabulary, a length below 1, a context or a number of pages beyond the limit.
                 FloatingPointError naming the request if a live row's logits are not finite. Pages go back to
                 the pool whatever happens.
        """
        limits = [max_new] * len(prompts) if isinstance(max_new, int) else list(max_new)
        waiting = deque(self._checked(prompts, limits))
        requests = list(waiting)
        active: list[_Request] = []
        rounds = 0
        try:
            while waiting or active:
                while waiting and len(active) < self.max_requests and self._fits(active, waiting[0]):
                    active.append(waiting.popleft())
                    self._start(active[-1])
                active = self._leave(active)
                if active:
                    self._round(active, rounds)
                    active = self._leave(active)
                    rounds += 1
        finally:
            for request in requests:
                self._release(request)
        return [self._generated(request) for request in requests]

    def _checked(self, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[_Request]:
        if len(limits) != len(prompts):
            raise ValueError(
                f"generate: max_new: expected {len(prompts)} lengths, one a prompt, got {len(limits)}"
            )
        requests = []
        for number, (prompt, max_new) in enumerate(zip(prompts, limits, strict=True)):
            request = _Request(number, list(prompt), max_new)
            if not request.prompt:
                raise ValueError(f"request {number}: expected at least one prompt token, got none")
            if max_new < 1:
                raise ValueError(f"request {number}: expected a length of at least 1, got {max_new}")
            for place, token in enumerate(request.prompt):
                if token != int(token) or not 0 <= token < self.vocab:
                    raise ValueError(
                        f"request {number}: expected prompt tokens from 0 to {self.vocab - 1},"
                        f" got {token} at place {place}"
                    )
            reach = self._reach(request)
            if reach > self.max_context:
                raise ValueError(
                    f"request {number}: expected at most {self.max_context} positions, got {reach}:"
                    f" {len(request.prompt)} of prompt, {max_new} new, {self.draft_len} of drafts"
                )
            if self._pages(reach) > self.pool.free:
                raise ValueError(
                    f"request {number}: expected at most {self.pool.free} free pages of {self.block_size},"
                    f" got {self._pages(reach)}"
                )
            requests.append(request)
        return requests

    def _reach(self, request: _Request) -> int:
        """Positions the request may write; its last new token is never fed back, its drafts may be."""
        return len(request.prompt) + request.max_new - 1 + self.draft_len

    def _pages(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def _fits(self, active: Sequence[_Request], request: _Request) -> bool:
        """Whether the pool has all that this request and the active ones may yet need. Alone it starts."""
        more = sum(self._pages(self._reach(r)) - len(r.pages) for r in (*active, request))
        return not active or more <= self.pool.free

    def _take_pages(self, request: _Request, positions: int) -> None:
        """Own the pages of positions 0 to positions - 1."""
        more = self._pages(positions) - len(request.pages)
        if more > 0:
            request.pages += self.pool.take(more)

    def _release(self, request: _Request) -> None:
        self.pool.give_back(request.pages)
        request.pages = []
        request.context = None

    def _leave(self, active: Sequence[_Request]) -> list[_Request]:
        """The requests that go on; the others give their pages back."""
        for request in active:
            if request.reason is not None:
                self._release(request)
        return [request for request in active if request.reason is None]

    def _start(self, request: _Request) -> None:
        """Prefill: keys of the whole prompt, the drafter's context of every row, the first new token."""
        length = len(request.prompt)
        self._take_pages(request, length)
        if self.drafter is not None:
            request.context = self.drafter.new_context(self._reach(request))
        tables = self._tables([request])
        top1 = 0
        for start in range(0, length, self.prefill_rows):
            stop = min(start + self.prefill_rows, length)
            tokens = self._tensor([request.prompt[start:stop]])
            seq_lens = torch.tensor([stop], dtype=torch.int32, device=tokens.device)
            output = self._prefill(Step.of(tokens, seq_lens, tables, self.block_size))
            self._check_finite(output.logits, [request], stop - start)
            if self.drafter is not None and self.taps is not None:
                self.drafter.write_context(request.context, self.taps.hold(output.taps), start)
            top1 = int(output.top1[-1])
        request.position = length
        self._deliver(request, [top1])

    def _round(self, active: Sequence[_Request], number: int) -> None:
        """One step of every active request."""
        q = 1 + self.draft_len
        for request in active:
            self._take_pages(request, request.position + q)
        anchors = self._tensor([r.anchor for r in active])
        positions = self._tensor([r.position for r in active])
        proposal: Proposal | None = None
        drafts = anchors.new_empty(len(active), 0)
        if self.drafter is not None:
            proposal = self.drafter.propose([r.context for r in active], anchors, positions)
            drafts = proposal.drafts
        step = verify_step(anchors, drafts, positions, self._tables(active), self.block_size)
        output = self._run(step)
        self._check_finite(output.logits, active, q)
        acceptance = self._accept(drafts, output.top1.view(-1, q), number)

        taps = None if self.taps is None else self.taps.hold(output.taps)
        delivered = []
        starts = tuple(r.position for r in active)
        for b, (request, accepted) in enumerate(zip(active, acceptance.accepted.tolist(), strict=True)):
            emitted = acceptance.emitted[b, : accepted + 1].tolist()
            if self.drafter is not None:
                request.accepted.append(accepted)
            request.position += accepted + 1
            delivered.append(tuple(self._deliver(request, emitted)))
        if self.on_step is not None:
            self.on_step(
                StepRecord(
                    step=step,
                    requests=tuple(r.number for r in active),
                    positions=starts,
                    proposal=proposal,
                    output=output,
                    acceptance=acceptance,
                    delivered=tuple(delivered),
                )
            )
        if self.drafter is not None and taps is not None:
            for b, (request, P) in enumerate(zip(active, starts, strict=True)):
                kept = request.position - P  # rows 0 to A: the anchor and the accepted drafts
                self.drafter.write_context(request.context, taps[b * q : b * q + kept], P)

    def _run(self, step: Step) -> StepOutput:
        """The step's live rows, run at a padded width if one is asked for."""
        if self.width is None:
            return self._decode(step)
        rows = -(-step.rows // self.width) * self.width
        output = self._decode(step.padded_to(rows))
        return StepOutput(*(x[: step.rows] for x in (output.logits, output.top1, output.taps)))

    def _accept(self, drafts: Tensor, top1: Tensor, number: int) -> Acceptance | Synthetic:
        if self.synthetic is None:
            return accept_greedy(drafts, top1)
        # keyed by the round and the row, so that every rank forces the same length
        rows = torch.arange(drafts.shape[0], device=drafts.device)
        draws = keyed_uniforms(self.synthetic.seed, rows, torch.full_like(rows, number), 1)
        return self.synthetic.accept(drafts, top1, draws[:, 0, 0])

    def _deliver(self, request: _Request, emitted: Sequence[int]) -> list[int]:
        """Keep emitted tokens up to a stop token or the length; the last one is the next anchor."""
        kept: list[int] = []
        for token in emitted[: request.max_new - len(request.tokens)]:
            kept.append(token)
            if token in self.stop:
                request.reason = "stop"
                break
        request.tokens += kept
        if request.reason is None and len(request.tokens) == request.max_new:
            request.reason = "length"
        request.anchor = emitted[-1]
        return kept

    def _tables(self, active: Sequence[_Request]) -> Tensor:
        """[B, M] int32. M follows from max_context alone, so a request's sums do not depend on another's."""
        rows = [r.pages + [0] * (self.table_width - len(r.pages)) for r in active]
        return torch.tensor(rows, dtype=torch.int32, device=self.assembly.device)

    def _tensor(self, ids: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.assembly.device)

    def _check_finite(self, logits: Tensor, active: Sequence[_Request], rows: int) -> None:
        finite = logits[:, : self.vocab].isfinite().all(dim=1).view(len(active), rows)
        if not bool(finite.all()):
            b, row = (~finite).nonzero()[0].tolist()
            request = active[b]
            raise FloatingPointError(
                f"request {request.number}: logits of row {row} of {rows} at context {request.position}"
                " are not finite"
            )

    def _generated(self, request: _Request) -> Generated:
        assert request.reason is not None  # the loop ends when every request has ended
        return Generated(
            tuple(request.tokens), request.reason, tuple(request.accepted), self.synthetic is not None
        )


def generate(
    assembly: Assembly,
    prompts: Sequence[Sequence[int]],
    max_new: int | Sequence[int],
    max_context: int,
    drafter: Proposer | None = None,
    *,
    max_requests: int = 1,
    prefill_rows: int = 512,
    stop: Collection[int] = (),
    decode: RunStep | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
) -> list[Generated]:
    """Generate with caches of its own, large enough for `max_requests` of `max_context` positions.

    Arguments and errors as in `Generator`.
    """
    block = attention_specs(assembly.plan)[0].block_size
    pages = max_requests * -(-max_context // block)
    return Generator(
        assembly,
        empty_caches(assembly.plan, pages, assembly.device, assembly.deployment.kv_format),
        PagePool(pages),
        max_context,
        drafter,
        max_requests=max_requests,
        prefill_rows=prefill_rows,
        stop=stop,
        decode=decode,
        on_step=on_step,
    )(prompts, max_new)
