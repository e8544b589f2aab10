"""The decode loop: speculative text is plain text, and everything goes back to where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from dspark_toys import (
    BLOCK,
    TAPS,
    VOCAB,
    Adding,
    Oracle,
    generator,
    prompts,
    scripted_target,
    tiny_drafter,
    tiny_target,
)
from torch import Tensor

from mono.assembly import Assembly
from mono.caches import LayerCache, PagePool
from mono.decode import StepOutput, run
from mono.dspark import (
    Acceptance,
    ContextCache,
    Drafter,
    Generator,
    Proposal,
    StepRecord,
    Synthetic,
    SyntheticSchedule,
    empty_caches,
    generate,
)
from mono.reference.numerics import NATIVE
from mono.step import Step

LENGTHS, NEW = (5, 41, 22), 38  # contexts of up to 79 keys: the sparse layers keep 24


@pytest.fixture(scope="module")
def target() -> Assembly:
    return tiny_target()


@pytest.fixture(scope="module")
def given() -> list[list[int]]:
    return prompts(*LENGTHS)


@pytest.fixture(scope="module")
def truth(target: Assembly, given: list[list[int]]) -> list[list[int]]:
    """Prompts with their plain greedy text, longer than any test asks for."""
    return [p + list(g.tokens) for p, g in zip(given, generator(target)(given, NEW + 20), strict=True)]


COUNTS = (0, 3, 1, 7, 5, 2, 6, 4)


def wrong_positions(number: int) -> set[int]:
    """Where drafts are wrong so that the rounds of request `number` accept COUNTS, from its own place on."""
    wrong, P = set(), LENGTHS[number]
    for i in range(2 * len(COUNTS)):
        count = COUNTS[(i + number) % len(COUNTS)]
        if count < 7:
            wrong.add(P + 1 + count)
        P += count + 1
    return wrong


def half_right(number: int, position: int) -> bool:
    return position in wrong_positions(number)


def texts(results: Sequence[Any]) -> list[list[int]]:
    return [list(r.tokens) for r in results]


def expected(truth: list[list[int]], new: int = NEW) -> list[list[int]]:
    return [t[n : n + new] for t, n in zip(truth, LENGTHS, strict=True)]


def test_the_plain_text_is_varied(truth: list[list[int]]) -> None:
    """Or equality of texts would mean little."""
    assert all(len(set(text)) > 8 for text in expected(truth))


@pytest.mark.parametrize("max_requests", [1, 2, 3])
@pytest.mark.parametrize("kind", ["random", "perfect", "half right"])
def test_speculative_greedy_is_plain_greedy(
    target: Assembly, given: list[list[int]], truth: list[list[int]], kind: str, max_requests: int
) -> None:
    drafter: Any = {
        "random": tiny_drafter,
        "perfect": lambda: Oracle(truth),
        "half right": lambda: Oracle(truth, half_right),
    }[kind]()
    new = 16 if kind == "random" else NEW  # a random drafter takes a round for every token
    results = generator(target, drafter, max_requests=max_requests)(given, new)
    assert texts(results) == expected(truth, new)
    accepted = [a for r in results for a in r.accepted]
    if kind == "perfect":
        assert set(accepted) == {7}
    if kind == "half right":
        for number, result in enumerate(results):
            assert result.accepted[:8] == COUNTS[number:] + COUNTS[:number]
    for result in results:  # the prefill gives one token, every round A + 1, the last one cut to the length
        assert sum(result.accepted) + len(result.accepted) + 1 >= new
        assert result.reason == "length"
        assert not result.performance_only


def test_in_native_sums_speculative_and_plain_text_part_at_near_ties_only(given: list[list[int]]) -> None:
    """One row and eight rows may sum in another order; texts are compared up to the first near tie."""
    near = 0.5  # logits spread by 8, thirty bf16 roundings are 1.1 % of that: four sigma of a margin's change
    margins: dict[int, list[float]] = {number: [] for number in range(3)}

    def watch(record: StepRecord) -> None:
        best = record.output.logits[:, :VOCAB].topk(2, dim=1).values
        margins[record.requests[0]].append(float(best[0, 0] - best[0, 1]))

    native = tiny_target(numerics=NATIVE)
    plain = texts(generator(native, on_step=watch)(given, 20))
    drafted = texts(generator(native, tiny_drafter(numerics=NATIVE))(given, 20))
    compared = 0
    for number in range(3):
        # the first token is the prefill's in both
        sure = next((i for i, m in enumerate(margins[number]) if m < near), 19) + 1
        assert drafted[number][:sure] == plain[number][:sure]
        compared += sure - 1
    assert compared >= 10


class Recorded(Drafter):
    """The random drafter, its drafts recorded and the oracle's handed out: real contexts, real rewinds."""

    def __init__(self, oracle: Oracle) -> None:
        made = tiny_drafter()
        super().__init__(made.spec, made.weights, made.numerics)
        self.oracle = oracle
        self.own: list[tuple[tuple[int, ...], Tensor]] = []
        self.contexts: list[ContextCache] = []
        self.poison = False

    def new_context(self, capacity: int) -> ContextCache:
        self.oracle.new_context(capacity)
        self.contexts.append(super().new_context(capacity))
        return self.contexts[-1]

    def write_context(self, context: ContextCache, taps: Tensor, start: int) -> None:
        at = next(i for i, c in enumerate(self.contexts) if c is context)
        self.oracle.write_context(self.oracle.contexts[at], taps, start)
        stop = start + len(taps)
        if self.poison:  # what a policy that writes rejected rows as well would leave behind
            super().write_context(context, taps, start)
            more = min(7, context.capacity - stop)
            super().write_context(context, torch.full_like(taps[:1].expand(more, -1), float("nan")), stop)
        super().write_context(context, taps, start)

    def propose(
        self, contexts: Sequence[ContextCache], anchors: Tensor, positions: Tensor, keep_logits: bool = False
    ) -> Proposal:
        got = super().propose(contexts, anchors, positions, keep_logits=True)
        assert got.logits is not None
        self.own.append((tuple(positions.tolist()), got.logits))
        which = [next(i for i, c in enumerate(self.contexts) if c is x) for x in contexts]
        return self.oracle.propose([self.oracle.contexts[i] for i in which], anchors, positions)


def prefix_state(target: Assembly, ids: list[int]) -> tuple[list[LayerCache], Tensor, StepOutput]:
    """Caches, block table and output of one pass over `ids`: a run that never drafted."""
    pages = -(-len(ids) // BLOCK)
    caches = empty_caches(target.plan, pages)
    table = torch.arange(pages, dtype=torch.int32)[None]
    step = Step.of(torch.tensor([ids]), torch.tensor([len(ids)], dtype=torch.int32), table, BLOCK)
    return caches, table, run(target, step, caches, TAPS)


def rows_of(cache: LayerCache, table: Tensor, count: int) -> list[Tensor]:
    """Stored bytes of positions 0 to count - 1."""
    kept = []
    for x in (cache.k, cache.v, cache.k_scale, cache.v_scale, cache.index_k):
        if x is not None:
            flat = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
            kept.append(flat[table[0].long()].flatten(0, 1)[:count])
    return kept


def test_after_every_step_caches_and_taps_are_those_of_a_run_that_never_drafted(
    target: Assembly, given: list[list[int]], truth: list[list[int]]
) -> None:
    """Rejected keys are overwritten before anything reads them, rejected taps are never read."""
    drafter = Recorded(Oracle(truth, half_right))
    checked = 0
    loop: Generator

    def look(record: StepRecord) -> None:
        nonlocal checked
        for b, (number, P) in enumerate(zip(record.requests, record.positions, strict=True)):
            done = P + int(record.acceptance.accepted[b]) + 1  # committed positions: 0 to P + A
            if checked % 3 == 0:
                caches, table, output = prefix_state(target, truth[number][:done])
                decisive = record.output.logits.view(-1, 8, 64)[b, : done - P]
                assert torch.equal(decisive, output.logits[P:done])
                mine = record.step.block_tables[b : b + 1]
                for one, other in zip(loop.caches, caches, strict=True):
                    for x, y in zip(rows_of(one, mine, done), rows_of(other, table, done), strict=True):
                        assert torch.equal(x, y)
            checked += 1

    loop = generator(target, drafter, max_requests=2, on_step=look)
    loop(given, NEW)
    assert checked > 20
    for context, text in zip(drafter.oracle.contexts, truth, strict=True):
        count = len(context.taps)
        _, _, output = prefix_state(target, text[:count])
        assert torch.equal(torch.stack(context.taps), output.taps)
        fresh = tiny_drafter()
        made = fresh.new_context(count)
        fresh.write_context(made, output.taps, 0)
        kept = drafter.contexts[context.number]
        assert kept.written == count
        assert torch.equal(kept.k[:, :count], made.k)
        assert torch.equal(kept.v[:, :count], made.v)


def test_drafts_are_the_same_whether_rejected_rows_were_written_or_not(
    target: Assembly, given: list[list[int]], truth: list[list[int]]
) -> None:
    runs = []
    for poison in (False, True):
        drafter = Recorded(Oracle(truth, half_right))
        drafter.poison = poison
        results = generator(target, drafter, max_requests=2)(given, NEW)
        assert texts(results) == expected(truth)
        runs.append(drafter.own)
    assert len(runs[0]) == len(runs[1]) > 5
    for (at, one), (also_at, other) in zip(*runs, strict=True):
        assert at == also_at
        assert torch.equal(one, other)


@pytest.mark.parametrize("prefill_rows", [3, 16])
def test_chunked_prefill_equals_whole_prefill(
    target: Assembly, given: list[list[int]], truth: list[list[int]], prefill_rows: int
) -> None:
    own = []
    for rows in (512, prefill_rows):
        drafter = Recorded(Oracle(truth))
        results = generator(target, drafter, prefill_rows=rows)(given, 10)
        assert texts(results) == expected(truth, 10)
        own.append(drafter.own)
    for (_, whole), (_, chunked) in zip(*own, strict=True):
        assert torch.equal(whole, chunked)


def test_a_request_does_not_depend_on_its_company_order_or_slot(
    target: Assembly, given: list[list[int]]
) -> None:
    """Logits and drafts of a batch of two are those of each request alone, bit for bit, in either order."""

    def told(which: list[int], max_requests: int) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        rows: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

        def watch(record: StepRecord) -> None:
            assert record.drafts is not None
            for b, (number, P) in enumerate(zip(record.requests, record.positions, strict=True)):
                rows[which[number], P] = (record.drafts[b], record.output.logits.view(-1, 8, 64)[b])

        g = generator(target, tiny_drafter(), max_requests=max_requests, on_step=watch)
        g([given[i] for i in which], 12)
        return rows

    alone = told([0, 1], 1)
    for which in ([0, 1], [1, 0]):
        together = told(which, 2)
        assert together.keys() == alone.keys()
        for key, (drafts, logits) in together.items():
            assert torch.equal(drafts, alone[key][0])
            assert torch.equal(logits, alone[key][1])


def test_a_run_repeats_bit_for_bit(target: Assembly, given: list[list[int]]) -> None:
    logits: list[list[Tensor]] = [[], []]
    for seen in logits:
        records: list[StepRecord] = []
        generator(target, tiny_drafter(), max_requests=2, on_step=records.append)(given, 8)
        seen += [record.output.logits for record in records]
    assert all(torch.equal(x, y) for x, y in zip(*logits, strict=True))


def test_the_record_says_what_happened(
    target: Assembly, given: list[list[int]], truth: list[list[int]]
) -> None:
    records: list[StepRecord] = []
    results = generator(target, Oracle(truth, half_right), max_requests=2, on_step=records.append)(given, NEW)
    told: dict[int, list[int]] = {i: [] for i in range(3)}
    for record in records:
        assert isinstance(record.acceptance, Acceptance)
        assert record.drafts is not None
        assert record.step.rows == 8 * len(record.requests) == len(record.output.top1)
        for b, (number, P) in enumerate(zip(record.requests, record.positions, strict=True)):
            assert record.step.tokens.view(-1, 8)[b].tolist() == [
                truth[number][P],
                *record.drafts[b].tolist(),
            ]
            emitted = record.acceptance.emitted[b, : int(record.acceptance.accepted[b]) + 1].tolist()
            assert emitted == truth[number][P + 1 : P + 1 + len(emitted)]
            assert list(record.delivered[b]) == emitted[: len(record.delivered[b])]
            told[number] += record.delivered[b]
    for number, result in enumerate(results):
        assert list(result.tokens[1:]) == told[number]  # the first token is the prefill's
        assert result.accepted == tuple(
            int(r.acceptance.accepted[r.requests.index(number)]) for r in records if number in r.requests
        )
    assert max(len(r.requests) for r in records) == 2
    assert {2} & {n for r in records for n in r.requests}, "the third prompt joined when a place was free"


# The toy of the rewind: the next draft is the sum of the ids in the drafter's cache


@pytest.mark.parametrize(
    ("case", "block", "script", "tokens", "accepted", "next_draft"),
    [
        ("all accepted", 3, {1: 11, 2: 23, 3: 46, 4: 92, 5: 3}, [11, 23, 46, 92, 3], 3, 90),
        ("first accepted", 3, {1: 11, 2: 23, 3: 50}, [11, 23, 50], 1, 96),
        ("none accepted", 3, {1: 11, 2: 40}, [11, 40], 0, 63),  # 5 + 7 + 11 + 40
        ("width 1", 0, {1: 11, 2: 40}, [11, 40], 0, 63),
    ],
)
def test_accept_and_rewind(
    case: str, block: int, script: dict[int, int], tokens: list[int], accepted: int, next_draft: int
) -> None:
    """95: the last draft never entered the cache. 45: a rejected one stayed. 73: one too many went."""
    drafter, target = Adding(block), scripted_target(script)
    records: list[StepRecord] = []
    g = generator(target, drafter, max_context=64, on_step=records.append)
    g([[5, 7]], len(tokens) + 1)
    assert drafter.proposed[0][:3] == [23, 46, 92][: max(block, 1)]
    first = records[0].acceptance
    assert first.accepted.tolist() == [accepted]
    assert first.emitted[0, : accepted + 1].tolist() == tokens[1:]
    assert drafter.proposed[1][0] == next_draft
    # the drafter's cache is the committed text, and so are the target's keys (fp8: within 2^-4)
    committed = [5, 7, *tokens]
    assert drafter.contexts[0][: len(committed)] == committed
    cache = g.caches[0]
    pages = records[1].step.block_tables[0].long()
    keys = (cache.k[pages].float() * cache.k_scale[pages].unsqueeze(-1)).flatten(0, 1)[: len(committed), 0, 0]
    assert torch.allclose(keys, torch.tensor(committed).float(), rtol=2**-4)


# Ends


def with_stop_in(truth: list[int], start: int, wanted: int) -> int:
    """A token whose first occurrence in the text from `start` is at place `wanted` or the next such place."""
    text = truth[start:]
    return next(t for i, t in enumerate(text) if i >= wanted and text.index(t) == i)


@pytest.mark.parametrize("wanted", [0, 1, 4, 8, 9])
def test_a_stop_token_ends_the_text_wherever_it_falls(
    target: Assembly, given: list[list[int]], truth: list[list[int]], wanted: int
) -> None:
    """Place 0 is the prefill's token; with perfect drafts places 1 to 7 are drafts and place 8 the bonus."""
    stop = with_stop_in(truth[0], LENGTHS[0], wanted)
    place = truth[0][LENGTHS[0] :].index(stop)
    plain, spec = (
        generator(target, drafter, stop=[stop])(given[:1], NEW)[0] for drafter in (None, Oracle(truth))
    )
    assert plain.tokens == spec.tokens == tuple(truth[0][LENGTHS[0] : LENGTHS[0] + place + 1])
    assert plain.reason == spec.reason == "stop"
    # accepted counts are from before the cut
    assert set(spec.accepted) <= {7}
    assert len(spec.accepted) == (place + 7) // 8


def test_a_stop_cut_is_visible_in_the_record(
    target: Assembly, given: list[list[int]], truth: list[list[int]]
) -> None:
    stop = with_stop_in(truth[0], LENGTHS[0], 3)
    place = truth[0][LENGTHS[0] :].index(stop)
    records: list[StepRecord] = []
    generator(target, Oracle(truth), stop=[stop], on_step=records.append)(given[:1], NEW)
    last = records[-1]
    assert last.acceptance.accepted.tolist() == [7]
    assert len(last.delivered[0]) == (place - 1) % 8 + 1
    assert last.delivered[0][-1] == stop


@pytest.mark.parametrize("new", [1, 2, 8, 9, 10, 16])
def test_the_length_is_exact(
    target: Assembly, given: list[list[int]], truth: list[list[int]], new: int
) -> None:
    for drafter in (None, Oracle(truth), Oracle(truth, half_right)):
        results = generator(target, drafter, max_requests=2)(given, new)
        assert texts(results) == expected(truth, new)
        assert {r.reason for r in results} == {"length"}


def test_each_prompt_has_its_own_length(
    target: Assembly, given: list[list[int]], truth: list[list[int]]
) -> None:
    results = generator(target, Oracle(truth), max_requests=2)(given, [3, 20, 9])
    assert [list(r.tokens) for r in results] == [
        t[n : n + new] for t, n, new in zip(truth, LENGTHS, (3, 20, 9), strict=True)
    ]


@pytest.mark.parametrize("length", range(BLOCK, 2 * BLOCK))
def test_a_page_boundary_inside_the_verify_rows(target: Assembly, length: int) -> None:
    """Whatever the anchor's offset in its page, the next page is there before the step that needs it."""
    given = prompts(length)
    plain = generator(target)(given, 20)
    records: list[StepRecord] = []
    g = generator(target, tiny_drafter(), pages=6, on_step=records.append)
    assert texts(g(given, 20)) == texts(plain)
    for record in records:
        pages = (record.positions[0] + 7) // BLOCK + 1
        assert len(set(record.step.block_tables[0, :pages].tolist())) == pages
        assert (record.step.slots >= 0).all()


def test_pages_are_taken_as_they_are_needed_and_all_given_back(
    target: Assembly, given: list[list[int]], truth: list[list[int]]
) -> None:
    """A pool that holds only one long request at a time still serves them all; dirty pages are recycled."""
    pages = (LENGTHS[1] + NEW + 6 + BLOCK - 1) // BLOCK
    g = generator(target, Oracle(truth, half_right), pages=pages, max_requests=3)
    assert texts(g(given, NEW)) == expected(truth)
    assert sorted(g.pool.take(pages)) == list(range(pages))


def test_pages_come_back_after_a_failure(target: Assembly, given: list[list[int]]) -> None:
    calls = 0

    def broken(step: Step) -> StepOutput:
        nonlocal calls
        calls += 1
        output = run(target, step, g.caches, TAPS)
        if calls == 2:
            output.logits[11, 3] = float("nan")
        return output

    g = generator(target, tiny_drafter(), max_requests=2, pages=30, decode=broken)
    with pytest.raises(FloatingPointError, match="request 1: logits of row 3 of 8 at context"):
        g(given, NEW)
    assert len(g.pool.take(30)) == 30


def test_a_decode_path_of_its_own_runs_every_step_at_the_asked_width(
    target: Assembly, given: list[list[int]], truth: list[list[int]]
) -> None:
    rows: list[int] = []

    def decode(step: Step) -> StepOutput:
        rows.append(step.rows)
        output = run(target, step, g.caches, TAPS)
        output.logits[~step.live] = float("nan")  # what a padding row holds is nobody's business
        return output

    g = generator(target, Oracle(truth, half_right), max_requests=3, decode=decode, width=16)
    results = texts(g(given, [20, 10, 5]))
    assert results == [text[:n] for text, n in zip(expected(truth), (20, 10, 5), strict=True)]
    assert set(rows) == {16, 32}


@pytest.mark.parametrize(
    ("bad", "new", "expected_words"),
    [
        ([[1], []], 4, "request 1: expected at least one prompt token, got none"),
        (
            [[1], [2, VOCAB]],
            4,
            f"request 1: expected prompt tokens from 0 to {VOCAB - 1}, got {VOCAB} at place 1",
        ),
        ([[1], [-1]], 4, "request 1: expected prompt tokens from 0 to 59, got -1 at place 0"),
        ([[1], [2]], 0, "request 0: expected a length of at least 1, got 0"),
        ([[1], [2] * 50], 8, "request 1: expected at most 63 positions, got 64"),
        ([[1], [2]], [4], "expected 2 lengths"),
    ],
)
def test_bad_input_is_named_before_anything_changes(
    target: Assembly, bad: list[list[int]], new: int, expected_words: str
) -> None:
    drafter = tiny_drafter()
    g = generator(target, drafter, pages=16, max_context=63)
    before = [c.clone() for c in g.caches]
    with pytest.raises(ValueError, match=expected_words):
        g(bad, new)
    for one, other in zip(g.caches, before, strict=True):
        assert torch.equal(one.k.view(torch.uint8), other.k.view(torch.uint8))
    assert g.pool.free == 16


def test_the_last_position_may_be_used_and_no_further(target: Assembly) -> None:
    """49 of prompt, 8 new and 7 drafts reach 63 positions: the last verify row may write the 63rd."""
    given = prompts(49)
    want = texts(generator(target)(given, 8))
    top = [0]

    def watch(record: StepRecord) -> None:
        top[0] = max(top[0], int(record.step.positions.max()))

    assert texts(generator(target, tiny_drafter(), max_context=63, on_step=watch)(given, 8)) == want
    assert top[0] == 62


def test_too_few_pages_are_named(target: Assembly) -> None:
    with pytest.raises(ValueError, match="request 0: expected at most 2 free pages of 8, got 3"):
        generator(target, tiny_drafter(), pages=2)([[1] * 10], 2)


def test_the_generator_checks_what_it_is_made_of(target: Assembly) -> None:
    with pytest.raises(ValueError, match="max_requests: expected at least 1, got 0"):
        generator(target, max_requests=0)
    with pytest.raises(ValueError, match="caches: expected 4 of one block size"):
        Generator(target, empty_caches(target.plan, 4)[:3], generator(target).pool, 64)
    spec = replace(tiny_drafter().spec, taps=(0, 2, 4))
    with pytest.raises(ValueError, match="from -1 to 3"):
        generator(target, Drafter(spec, tiny_drafter().weights))
    spec = replace(tiny_drafter().spec, vocab=59, noise_token=0)
    with pytest.raises(ValueError, match="drafter: expected the target's vocabulary of 60, got 59"):
        generator(target, Drafter(spec, tiny_drafter().weights))
    with pytest.raises(ValueError, match="max_context: expected at most 192, the deployment's, got 193"):
        generator(target, max_context=193)
    for width in (0, 12):
        with pytest.raises(ValueError, match=f"width: expected a multiple of 8 rows a request, got {width}"):
            generator(target, tiny_drafter(), width=width)
    with pytest.raises(ValueError, match="synthetic acceptance of 7 drafts needs a drafter"):
        generator(target, synthetic=SyntheticSchedule(4.0, 7))


def test_caches_are_the_plans_the_deployments_and_the_pools(target: Assembly) -> None:
    def over(caches: list[LayerCache]) -> None:
        Generator(target, caches, PagePool(4), 192)

    caches = empty_caches(target.plan, 4)
    with pytest.raises(ValueError, match=r"layer 0: cache: expected 4 pages in fp8_e4m3, got 3 in fp8_e4m3"):
        over(empty_caches(target.plan, 3))
    with pytest.raises(ValueError, match=r"layer 0: cache: expected 4 pages in fp8_e4m3, got 4 in bf16"):
        over(empty_caches(target.plan, 4, kv_format="bf16"))
    with pytest.raises(ValueError, match=r"layer 0: cache\.k: expected \[4, 8, 2, 16\], got \[4, 8, 1, 16\]"):
        over([LayerCache.empty(4, 8, 1, 16, None), *caches[1:]])
    with pytest.raises(ValueError, match=r"layer 1: cache\.index_k: expected \[4, 8, 16\], got nothing"):
        over([caches[0], replace(caches[1], index_k=None), *caches[2:]])


def test_pages_that_others_hold_are_not_counted_on(target: Assembly, given: list[list[int]]) -> None:
    pool = PagePool(48)
    g = Generator(target, empty_caches(target.plan, 48), pool, 192, max_requests=4)
    want = texts(g(given, 8))
    pool.take(40)
    assert texts(g(given, 8)) == want  # fewer at a time
    pool.take(7)
    with pytest.raises(ValueError, match="expected at most 1 free pages of 8, got"):
        g(given, 8)
    assert pool.free == 1


def test_a_bf16_cache_where_the_deployment_says_so(target: Assembly, given: list[list[int]]) -> None:
    served = replace(target, deployment=replace(target.deployment, kv_format="bf16"))
    own = Generator(served, empty_caches(target.plan, 48, kv_format="bf16"), PagePool(48), 100)
    assert texts(generate(served, given, 8, 100)) == texts(own(given, 8))


def test_generate_brings_its_own_caches(
    target: Assembly, given: list[list[int]], truth: list[list[int]]
) -> None:
    results = generate(target, given, 8, 100, tiny_drafter(), max_requests=2)
    assert texts(results) == expected(truth, 8)


# Forced acceptance


def test_forced_acceptance_of_4_gives_3_drafts_and_a_token_each_round(
    target: Assembly, given: list[list[int]]
) -> None:
    records: list[StepRecord] = []
    results = generator(
        target, tiny_drafter(), synthetic=SyntheticSchedule(4.0, 7), on_step=records.append, max_requests=2
    )(given, 33)
    assert all(r.accepted == (3,) * 8 for r in results)
    assert all(r.performance_only for r in results)
    for record in records:
        assert isinstance(record.acceptance, Synthetic)
        assert record.drafts is not None
        assert torch.equal(record.acceptance.emitted[:, :3], record.drafts[:, :3])
        assert torch.equal(record.acceptance.emitted[:, 3], record.output.top1.view(-1, 8)[:, 3])
