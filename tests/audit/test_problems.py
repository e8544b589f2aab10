"""Problems, prompts, tokens: right by arithmetic done here, disjoint by construction, the same for a seed."""

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.tiny import problems, tokens
from audit.tiny.problems import PLANS, Prompt, flexible_answer, part_of, problem, strict_answer

seeds = st.integers(0, 2**32 - 1)


def answer_of(plan: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """The answer of a problem, from its plan and numbers alone."""
    start, *events, end = plan
    left = list(numbers)

    def take() -> int:
        return left.pop(0)

    other = None
    if start == "own":
        value = take()
    elif start == "boxes":
        value = take() * take()
    elif start == "two":
        value = take() + take()
    elif start == "times":
        times, other = take(), take()
        value = times * other
    else:
        other, more = take(), take()
        value = other + more if start == "more" else other - more
    for event in events:
        if event == "gain":
            value += take()
        elif event == "lose":
            value -= take()
        elif event == "cases":
            value += take() * take()
        else:
            value *= take()
    if end == "share":
        value, rest = divmod(value, take())
        assert rest == 0
    elif end == "price":
        value *= take()
    elif end == "total":
        value += take() if other is None else other
    assert not left
    return value


@given(seeds, st.sampled_from(["train", "test"]))
def test_the_answer_follows_from_plan_and_numbers(seed, part):
    made = problem(Random(seed), part)
    assert made.answer == answer_of(made.plan, made.numbers)
    assert 0 < made.answer <= problems.LARGEST


@given(seeds)
def test_every_line_of_the_working_is_true(seed):
    made = problem(Random(seed))
    chains = re.findall(r"\d+(?: [-+*/=] \d+)+", made.worked)
    assert chains
    for chain in chains:
        first, *others = chain.split(" = ")
        for side in others:
            # digits and operators alone, by the pattern above
            assert eval(first) == eval(side), chain
    assert int(chains[-1].split(" = ")[-1]) == made.answer


@given(seeds)
def test_both_extractions_find_the_answer(seed):
    made = problem(Random(seed))
    assert strict_answer(made.worked) == flexible_answer(made.worked) == made.answer


@given(seeds)
def test_numbers_stand_in_the_question(seed):
    made = problem(Random(seed))
    assert sorted(map(int, re.findall(r"\d+", made.question))) == sorted(made.numbers)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so 3 + 4 = 7\n#### 7\n", 7, 7),
        ("#### 7\nand 8 more", 7, 8),
        ("it is 12.", None, 12),
        ("#### -3", -3, -3),
        ("#### seven", None, None),
        (" #### 7", None, 7),
        ("####7", None, 7),
        ("", None, None),
    ],
)
def test_extraction(text, strict, flexible):
    assert strict_answer(text) == strict
    assert flexible_answer(text) == flexible


@given(seeds)
def test_parts_are_disjoint_whatever_the_wording(seed):
    train, test = problem(Random(seed), "train"), problem(Random(seed + 1), "test")
    assert part_of(train.plan, train.numbers) == train.part == "train"
    assert part_of(test.plan, test.numbers) == test.part == "test"
    assert (train.plan, train.numbers) != (test.plan, test.numbers)


def test_one_combination_in_sixteen_is_for_testing():
    parts = [part_of(("own", "gain", "now"), (a, b)) for a in range(100) for b in range(100)]
    # a binomial of 10,000 draws at 1/16 has sigma 24: four of them either way
    assert abs(parts.count("test") - 625) < 100


def test_training_documents_hold_no_test_problem():
    ids, in_answer = problems.document(Random(3), 20_000)
    text = tokens.decode(ids)
    asked = re.findall(r"Question: (.*)\n", text)
    assert len(asked) > 50
    rng = Random(3)
    for question in asked:
        made = problem(rng)
        assert made.question == f"Question: {question}\n"
        assert made.part == "train"
    assert len(ids) == len(in_answer) == 20_000


def test_a_document_marks_answers_and_their_end():
    ids, in_answer = problems.document(Random(5), 600)
    assert ids[0] == tokens.BOS
    assert not in_answer[0]
    marked = "".join(tokens.decode([i]) if m else "|" for i, m in zip(ids, in_answer, strict=True))
    first = re.sub(r"\|+", "|", marked).split("|")[1]
    assert first.startswith(" ")
    assert strict_answer(first) is not None
    assert "Question" not in first
    assert all(m for i, m in zip(ids, in_answer, strict=True) if i == tokens.EOS)


SETS = {"ordinary": problems.ordinary_prompts, "long": problems.long_prompts, "open": problems.open_prompts}


@pytest.mark.parametrize("name", SETS)
def test_a_set_is_a_function_of_its_seed(name):
    make = SETS[name]
    assert make(8) == make(8)
    assert make(8)[:3] == make(3)
    assert make(8, seed=1) != make(8)
    assert len({prompt.ids for prompt in make(8)}) == 8


@pytest.mark.parametrize(("name", "shots"), [("ordinary", 2), ("long", 4), ("open", 2)])
def test_prompts_end_in_a_held_out_problem(name, shots):
    for prompt in SETS[name](30):
        assert prompt.ids[0] == tokens.BOS
        assert prompt.ids.count(tokens.EOS) == shots
        text = tokens.decode(prompt.ids)
        assert text.endswith(prompt.text)
        assert len(prompt.ids) > 4 * 16  # more keys than a row may attend to, so that selection matters
        if name == "open":
            assert prompt.answer is None
            assert prompt.text.startswith("Question: ")
            assert "Answer:" not in prompt.text
        else:
            assert prompt.text.endswith("?\nAnswer:")
            assert prompt.answer is not None
        if name == "long":
            assert len(prompt.ids) <= 1500


def test_prompts_of_a_set_do_not_share_answers():
    answers = [prompt.answer for prompt in problems.ordinary_prompts(200)]
    # a model that always says the same number must not look good
    assert max(answers.count(a) for a in answers) < 10


def test_every_plan_can_be_drawn():
    rng = Random(0)
    seen = {problem(rng).plan for _ in range(20_000)}
    assert seen == set(PLANS)


def test_a_prompt_is_a_value():
    prompt = problems.ordinary_prompts(1)[0]
    assert hash(prompt) == hash(Prompt(prompt.ids, prompt.text, prompt.answer))


# tokens


@given(st.text())
def test_text_survives_the_tokens(text):
    ids = tokens.encode(text)
    assert all(0 <= i < 256 for i in ids)
    assert tokens.decode(ids) == text
    assert tokens.decode([tokens.BOS, *ids, tokens.EOS, tokens.PAD, tokens.NOISE]) == text


@pytest.mark.parametrize("bad", [-1, tokens.TOKENS, tokens.ROWS - 1, 10_000])
def test_no_token_is_refused_by_name_and_place(bad):
    with pytest.raises(ValueError, match=rf"got {bad} at place 1"):
        tokens.decode([65, bad])


def test_padded_rows_exist_and_are_no_tokens():
    ids = [tokens.BOS, tokens.EOS, tokens.PAD, tokens.NOISE]
    assert len({*range(256), *ids}) == tokens.TOKENS < tokens.ROWS
