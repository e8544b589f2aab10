"""Generated grade-school word problems: what the embedded checkpoints were trained on and are measured with.

A problem is a plan (a start, one or two events, a question) with numbers put in, then put into words:

    Question: Mia owns 4 boxes of 23 shells. Later she loses 12 of them. How many shells does Mia have now?
    Answer: So we get 4 * 23 = 4 * 20 + 4 * 3 = 80 + 12 = 92 shells. Next, Mia has 92 - 12 = 80. Nice!
    #### 80

The plan and the numbers decide the answer; the words are drawn with equal weights, so that a model of the
text is sure of every digit and torn at the words. Training and test problems are disjoint by construction:
the CRC-32 of plan and numbers, not of the wording, puts one problem in sixteen into the test part.

Everything here is a pure function of its seed.
"""

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Literal, TypeVar

from audit.tiny.tokens import BOS, EOS, encode

Part = Literal["train", "test"]
T = TypeVar("T")

TEST_SHARE = 16  # one combination of plan and numbers in this many is a test problem
LARGEST = 999  # no number in a problem or its working is larger

SHE = (
    "Mia", "Ana", "Eve", "Ida", "Zoe", "Lena", "Nora", "Ruth", "Sara", "Tina", "Vera", "Wanda", "Ella",
    "Fay", "Gina", "Hana", "Iris", "June", "Kate", "Lucy", "Maya", "Nina", "Olga", "Rosa",
)  # fmt: skip
HE = (
    "Tom", "Ben", "Max", "Leo", "Sam", "Jon", "Adam", "Carl", "Dan", "Emil", "Finn", "Gus", "Hugo", "Ivan",
    "Jack", "Karl", "Luis", "Mark", "Noah", "Otto", "Paul", "Rob", "Theo", "Yuri",
)  # fmt: skip
OBJECTS = (
    "apples", "balls", "beads", "bells", "books", "boxes", "bricks", "brooms", "buttons", "cakes",
    "candles", "cards", "coins", "combs", "cookies", "cups", "dolls", "drums", "eggs", "fans", "flags",
    "forks", "hats", "jars", "kites", "knots", "lamps", "leaves", "lemons", "maps", "masks", "mugs",
    "nails", "nuts", "pears", "pens", "pins", "plums", "rings", "ropes", "shells", "shirts", "spoons",
    "stamps", "stones", "tickets", "tiles", "toys", "vases", "wheels",
)  # fmt: skip
COLOURS = (
    "red", "blue", "green", "white", "black", "yellow",
)  # fmt: skip
HOLDS = ("has", "owns", "keeps", "stores")
CASES = ("boxes", "crates", "bags", "packs", "trays")
TIMES = ("Then", "Later", "One day", "After lunch", "Soon", "In May")
GAINS = ("finds", "buys", "gets", "wins", "makes")
LOSSES = ("loses", "sells", "uses", "drops", "gives away")
GROWS = ("grows", "rises", "jumps", "climbs")
SPLITS = ("shares", "splits", "divides", "hands out")
GROUPS = ("friends", "children", "pupils", "cousins", "neighbours")
ENDINGS = ("now", "at last", "in the end", "today", "by then")
OPENERS = ("Then", "Next,", "So", "After that,", "Good,", "Well,", "Okay,", "Look,")
CLOSINGS = ("", " Good work!", " That is all.", " We are done.", " Nice!", " Easy.", " It fits.", " Yes!")

STARTS = ("own", "boxes", "two", "times", "more", "fewer")
EVENTS = ("gain", "lose", "cases", "grow")
ENDS = ("now", "share", "price", "total")
STEPS = {"own": 0, "cases": 2, "now": 0}  # one step of working for all others


def _steps(plan: Sequence[str]) -> int:
    return sum(STEPS.get(item, 1) for item in plan)


PLANS = tuple(
    (start, *events, end)
    for start, end in product(STARTS, ENDS)
    for events in (*product(EVENTS), *product(EVENTS, EVENTS))
    if 2 <= _steps((start, *events, end)) <= 3 and events.count("grow") < 2
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One worked problem.

    `question` ends in a newline, `worked` begins with a space and ends in `#### n` and a newline.
    """

    plan: tuple[str, ...]
    numbers: tuple[int, ...]
    question: str
    worked: str
    answer: int

    @property
    def part(self) -> Part:
        return part_of(self.plan, self.numbers)

    def tokens(self) -> list[int]:
        """The whole problem as a model reads it: question, `Answer:`, working, EOS."""
        return [*encode(self.question + "Answer:" + self.worked), EOS]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model is asked to continue.

    ids:     BOS, the worked examples, then the unfinished problem; token ids.
    text:    the unfinished problem alone, as text.
    answer:  the number that a right continuation ends in; None if the question itself is unfinished.
    """

    ids: tuple[int, ...]
    text: str
    answer: int | None


def part_of(plan: Sequence[str], numbers: Sequence[int]) -> Part:
    """Which part a combination of plan and numbers belongs to, whatever its wording."""
    key = ",".join(plan) + ":" + ",".join(map(str, numbers))
    return "test" if zlib.crc32(key.encode()) % TEST_SHARE == 0 else "train"


def problem(rng: Random, part: Part = "train") -> Problem:
    """Draw a problem of `part`."""
    while True:
        plan = _one(rng, PLANS)
        numbers = _numbers(rng, plan)
        if numbers is not None and part_of(plan, numbers) == part:
            return _put_in_words(rng, plan, numbers)


def _one(rng: Random, options: Sequence[T]) -> T:
    return options[int(rng.random() * len(options))]


def _between(rng: Random, low: int, high: int) -> int:
    return low + int(rng.random() * (high - low + 1))


def _numbers(rng: Random, plan: Sequence[str]) -> tuple[int, ...] | None:
    """Numbers for `plan`, or None if the draw leads to a fraction, a negative or a large number."""
    start, *events, end = plan
    if start in ("boxes", "times"):
        numbers = [_between(rng, 2, 9), _between(rng, 2, 40)]
        value = numbers[0] * numbers[1]
    elif start == "own":
        numbers = [_between(rng, 5, 99)]
        value = numbers[0]
    else:
        numbers = [_between(rng, 5, 99), _between(rng, 2, 60)]
        value = numbers[0] + numbers[1] * (-1 if start == "fewer" else 1)
    for event in events:
        if value <= 1:
            return None
        if event == "gain":
            numbers.append(_between(rng, 2, 99))
            value += numbers[-1]
        elif event == "lose":
            numbers.append(_between(rng, 1, min(value - 1, 99)))
            value -= numbers[-1]
        elif event == "cases":
            numbers += [_between(rng, 2, 9), _between(rng, 2, 20)]
            value += numbers[-1] * numbers[-2]
        else:
            if value > 99:
                return None
            numbers.append(_between(rng, 2, 4))
            value *= numbers[-1]
    if value < 1:
        return None
    if end == "share":
        groups = [k for k in range(2, 8) if value % k == 0 and value // k <= 40]
        if not groups:
            return None
        numbers.append(_one(rng, groups))
    elif end == "price":
        if value > 99:
            return None
        numbers.append(_between(rng, 2, 9))
        value *= numbers[-1]
    elif end == "total" and start not in ("times", "more", "fewer"):
        numbers.append(_between(rng, 2, 99))
        value += numbers[-1]
    return tuple(numbers) if value <= LARGEST else None


def _times(a: int, b: int) -> str:
    """`a * b` worked out by tens and ones if b has both; a has one digit."""
    tens, ones = b // 10 * 10, b % 10
    if not tens or not ones:
        return f"{a} * {b} = {a * b}"
    return f"{a} * {b} = {a} * {tens} + {a} * {ones} = {a * tens} + {a * ones} = {a * b}"


def _put_in_words(rng: Random, plan: tuple[str, ...], numbers: tuple[int, ...]) -> Problem:
    start, *events, end = plan
    left = iter(numbers)
    female = rng.random() < 0.5
    name = _one(rng, SHE if female else HE)
    other = name
    while other == name:
        other = _one(rng, _one(rng, (SHE, HE)))
    who = "she" if female else "he"
    thing = _one(rng, OBJECTS)
    said: list[str] = []
    working: list[tuple[str, str]] = []  # equation, unit

    first = next(left)
    given = first  # what the other person has, where there is one
    if start == "own":
        value = first
        said.append(f"{name} {_one(rng, HOLDS)} {first} {thing}.")
    elif start == "boxes":
        each = next(left)
        value = first * each
        said.append(f"{name} {_one(rng, HOLDS)} {first} {_one(rng, CASES)} of {each} {thing}.")
        working.append((_times(first, each), thing))
    elif start == "two":
        second = next(left)
        value = first + second
        one, two = rng.sample(COLOURS, 2)
        said.append(f"{name} {_one(rng, HOLDS)} {first} {one} and {second} {two} {thing}.")
        working.append((f"{first} + {second} = {value}", thing))
    elif start == "times":
        given = next(left)
        value = first * given
        said.append(f"{other} {_one(rng, HOLDS)} {given} {thing}. {name} has {first} times as many.")
        working.append((_times(first, given), thing))
    else:
        second = next(left)
        sign = "+" if start == "more" else "-"
        value = first + second if start == "more" else first - second
        said.append(f"{other} {_one(rng, HOLDS)} {first} {thing}. {name} has {second} {start} than {other}.")
        working.append((f"{first} {sign} {second} = {value}", thing))

    for event in events:
        when = f"{_one(rng, TIMES)} {_one(rng, (who, name))}"
        count = next(left)
        if event == "gain":
            said.append(f"{when} {_one(rng, GAINS)} {count} more.")
            working.append((f"{value} + {count} = {value + count}", thing))
            value += count
        elif event == "lose":
            said.append(f"{when} {_one(rng, LOSSES)} {count} of them.")
            working.append((f"{value} - {count} = {value - count}", thing))
            value -= count
        elif event == "cases":
            each = next(left)
            said.append(f"{when} {_one(rng, GAINS)} {count} {_one(rng, CASES)} of {each}.")
            working.append((_times(count, each), thing))
            working.append((f"{value} + {count * each} = {value + count * each}", thing))
            value += count * each
        else:
            said.append(f"{_one(rng, TIMES)} the number {_one(rng, GROWS)} to {count} times as many.")
            working.append((_times(count, value), thing))
            value *= count

    if end == "now":
        said.append(f"How many {thing} does {name} have {_one(rng, ENDINGS)}?")
    elif end == "share":
        count = next(left)
        said.append(
            f"{name} {_one(rng, SPLITS)} them to {count} {_one(rng, GROUPS)}. How many does each get?"
        )
        working.append((f"{value} / {count} = {value // count}", thing))
        value //= count
    elif end == "price":
        count = next(left)
        said.append(f"Each costs {count} dollars. How many dollars is that {_one(rng, ENDINGS)}?")
        working.append((_times(count, value), "dollars"))
        value *= count
    else:
        if start not in ("times", "more", "fewer"):
            given = next(left)
            said.append(f"{other} {_one(rng, HOLDS)} {given}.")
        said.append(f"How many {thing} do {name} and {other} have {_one(rng, ENDINGS)}?")
        working.append((f"{value} + {given} = {value + given}", thing))
        value += given

    sentences = []
    for equation, unit in working:
        clause = _one(
            rng, (f"{name} has", "that makes", "we get", "it comes to", "our count is", "you find", "here is")
        )
        tail = _one(rng, (f" {unit}.", ".", "!", ";"))
        sentences.append(f" {_one(rng, OPENERS)} {clause} {equation}{tail}")
    worked = "".join(sentences) + _one(rng, CLOSINGS) + f"\n#### {value}\n"
    return Problem(plan, numbers, f"Question: {' '.join(said)}\n", worked, value)


# Answers


def strict_answer(text: str) -> int | None:
    """The number of the first line `#### n`, or None."""
    found = re.search(r"^#### (-?\d+)\s*$", text, re.MULTILINE)
    return int(found[1]) if found else None


def flexible_answer(text: str) -> int | None:
    """The last number of the text, whatever surrounds it, or None."""
    found = re.findall(r"-?\d+", text)
    return int(found[-1]) if found else None


# Documents for training


def document(rng: Random, length: int) -> tuple[list[int], list[bool]]:
    """`length` tokens of training problems after a BOS, the last one cut; and which tokens are answer bytes.

    An answer's bytes are those after `Answer:`, its EOS included.
    """
    ids, in_answer = [BOS], [False]
    while len(ids) < length:
        made = problem(rng)
        asked = encode(made.question + "Answer:")
        answered = [*encode(made.worked), EOS]
        ids += asked + answered
        in_answer += [False] * len(asked) + [True] * len(answered)
    return ids[:length], in_answer[:length]


# Prompts


def _prompt(rng: Random, shots: int, cut: Callable[[str], str] | None = None) -> Prompt:
    examples = [token for _ in range(shots) for token in problem(rng).tokens()]
    asked = problem(rng, "test")
    text = asked.question + "Answer:" if cut is None else cut(asked.question)
    return Prompt((BOS, *examples, *encode(text)), text, asked.answer if cut is None else None)


def _prompts(seed: int, kind: str) -> Iterator[Random]:
    """One generator per prompt, so that the first n prompts of a set are the same however many are asked
    for.
    """
    index = 0
    while True:
        yield Random(f"{kind} prompt {index} of seed {seed}")
        index += 1


def ordinary_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Held-out problems after two worked training problems."""
    return [_prompt(rng, shots=2) for rng, _ in zip(_prompts(seed, "ordinary"), range(count), strict=False)]


def long_prompts(count: int, seed: int = 0, longest: int = 1500) -> list[Prompt]:
    """Held-out problems after four worked training problems, at most `longest` tokens each."""
    made: list[Prompt] = []
    for rng in _prompts(seed, "long"):
        if len(made) == count:
            break
        prompt = _prompt(rng, shots=4)
        if len(prompt.ids) <= longest:
            made.append(prompt)
    return made


def open_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Held-out questions cut at a random byte after two worked training problems:

    many continuations are right.
    """

    def cut(rng: Random) -> Callable[[str], str]:
        return lambda question: question[: _between(rng, len("Question: "), len(question) - 1)]

    return [
        _prompt(rng, shots=2, cut=cut(rng))
        for rng, _ in zip(_prompts(seed, "open"), range(count), strict=False)
    ]
