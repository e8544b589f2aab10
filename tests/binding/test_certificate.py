"""A certificate is issued on full evidence only, read without trust, and covers exactly what it names."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from binding.issuing import KEY, NOW, SERVED, certificate, embedded, evidence, facts
from hypothesis import given, settings
from hypothesis import strategies as st

from mono import facts as facts_module
from mono.certificate import Certificate, CertificateError, Evidence, Facts, issue, read
from mono.facts import canonical, deployment_fingerprint, plan_fingerprint, sources_digest
from mono.strict_json import MOST_BYTES

HOUR = timedelta(hours=1)
PACKAGE = Path(facts_module.__file__).parent


@pytest.fixture(scope="module")
def served() -> Facts:
    return facts("m3.1")


@pytest.fixture
def file(tmp_path: Path, served: Facts) -> Path:
    path = tmp_path / "certificate.json"
    certificate(served).write(path)
    return path


# issuing


def test_what_is_issued_is_what_is_read(tmp_path: Path, served: Facts) -> None:
    for key in (None, KEY):
        issued = certificate(served, key)
        issued.write(tmp_path / "c.json")
        assert read(tmp_path / "c.json") == issued == read(tmp_path / "c.json", key)
        assert issued.covers(served, NOW) is None


def test_the_seals_are_the_documented_ones(file: Path) -> None:
    stored = json.loads(file.read_text())
    body = {name: value for name, value in stored.items() if name not in ("sha256", "hmac")}
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    assert stored["sha256"] == hashlib.sha256(text).hexdigest()
    assert stored["hmac"] is None


def test_numbers_round_trip(served: Facts) -> None:
    odd = evidence(served, bound=0.1 + 0.2, budget=0.3000000000000001)
    odd = replace(odd, ratios=tuple((slot, 1 / 3) for slot, _ in odd.ratios))
    issued = issue(served, odd, NOW, NOW + HOUR)
    assert issued.evidence == odd
    assert json.loads(issued.sealed())["evidence"]["bound"] == 0.1 + 0.2


def test_dates_are_kept_in_utc_to_the_second(served: Facts) -> None:
    there = NOW.astimezone(timezone(timedelta(hours=9))) + timedelta(microseconds=7)
    issued = issue(served, evidence(served), there, there + HOUR)
    assert (issued.issued, issued.issued.tzinfo, issued.expires) == (NOW, UTC, NOW + HOUR)


NO_EVIDENCE: list[tuple[dict[str, Any], str]] = [
    (
        {"performance_only": True},
        "performance only: its acceptance was forced, so its tokens are not the model's",
    ),
    ({"outcome": "fail"}, "expected the outcome 'pass', got 'fail'"),
    ({"outcome": "inconclusive"}, "expected the outcome 'pass', got 'inconclusive'"),
    ({"steps": 0}, "nothing was compared: 0 steps of 40 prompts"),
    ({"prompts": 0}, "nothing was compared: 320 steps of 0 prompts"),
    ({"bound": 0.02}, "expected a bound within the budget of 0.01, got 0.02"),
    ({"bound": 0.5, "budget": 1.0}, "expected a bound within the budget of 1.0, got 0.5"),
    ({"unexplained": 1}, "1 steps emitted other tokens"),
    ({"faults": (39, 40)}, "39 of 40 planted faults were detected"),
    ({"ratios": ()}, "embed: runs on the fast arm and was not visited"),
    ({"widths": (8,)}, "width 16: not visited"),
    ({"longest": 511}, "max_context 512: the longest context visited is 511"),
]


@pytest.mark.parametrize(("changes", "reason"), NO_EVIDENCE, ids=[reason for _, reason in NO_EVIDENCE])
def test_evidence_that_certifies_nothing(
    tmp_path: Path, served: Facts, changes: dict[str, Any], reason: str
) -> None:
    weak = evidence(served, **changes)
    with pytest.raises(ValueError, match="evidence") as caught:
        issue(served, weak, NOW, NOW + HOUR)
    assert str(caught.value) == f"evidence: {reason}"

    # nor does a file that somebody seals by hand, without a key
    stored = json.loads(certificate(served).sealed())
    stored["evidence"] |= json.loads(canonical(changes))
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(stored | {"sha256": seal(stored), "hmac": None}))
    with pytest.raises(CertificateError, match="evidence: ") as caught:
        read(forged)
    assert str(caught.value).endswith(reason)


def test_every_fast_slot_must_be_visited_and_no_other(served: Facts) -> None:
    sides = dict(served.sides)
    assert sides["layer 0 (sparse_attention)"] == sides["layer 2 (dense_mlp)"] == "reference"
    visited = evidence(served).ratios
    assert len(visited) == len(sides) - 6  # without the prefix, which runs on the original modules
    for slot, _ in visited:
        less = evidence(served, ratios=tuple(pair for pair in visited if pair[0] != slot))
        with pytest.raises(ValueError, match="was not visited") as caught:
            issue(served, less, NOW, NOW + HOUR)
        assert str(caught.value) == f"evidence: {slot}: runs on the fast arm and was not visited"


def test_nothing_fast_is_nothing_to_certify(served: Facts) -> None:
    slow = replace(served, sides=tuple((slot, "reference") for slot, _ in served.sides))
    with pytest.raises(ValueError, match="no slot runs on the fast arm"):
        issue(slow, evidence(slow), NOW, NOW + HOUR)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ratios": (("embed", float("nan")),)}, "Out of range float values"),
        ({"bound": float("inf")}, "Out of range float values"),
        ({"steps": 3.0}, r"evidence.steps: expected a count, got 3.0"),
        ({"steps": True}, r"evidence.steps: expected a count, got True"),
        ({"bound": 0}, r"evidence.bound: expected a finite number of at least 0.0, got 0"),
        ({"audit": "two\nlines"}, r"evidence.audit: expected 1 to 200 printable ASCII characters"),
        ({"modes": ("local", 3)}, r"evidence.modes\[1\]: expected 1 to 200 printable"),
        ({"performance_only": 0}, "evidence.performance_only: expected true or false, got 0"),
        ({"faults": (1, 2, 3)}, "evidence.faults: expected a list of 2"),
        ({"modes": {"local"}}, "not JSON serializable"),
    ],
)
def test_values_outside_the_schema_are_not_issued(served: Facts, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(CertificateError, match=match):
        issue(served, evidence(served, **changes), NOW, NOW + HOUR)


def test_dates_that_cannot_be_meant(served: Facts) -> None:
    with pytest.raises(ValueError, match="issued: expected a date with a time zone"):
        issue(served, evidence(served), NOW.replace(tzinfo=None), NOW + HOUR)
    with pytest.raises(ValueError, match="expires: expected a date with a time zone"):
        issue(served, evidence(served), NOW, datetime(2027, 1, 1))
    with pytest.raises(ValueError, match="expires: expected a date after"):
        issue(served, evidence(served), NOW, NOW)


def test_a_key_must_have_some_length(served: Facts) -> None:
    with pytest.raises(ValueError, match="key: expected at least 16 bytes, got 0"):
        certificate(served, b"")


# reading: seals


def seal(body: dict[str, Any]) -> str:
    return hashlib.sha256(canonical(body)).hexdigest()


def message(path: str | Path, key: bytes | None = None) -> str:
    """The one line that `read` raises, without the path that begins it."""
    with pytest.raises(CertificateError) as caught:
        read(path, key)
    text = str(caught.value)
    assert "\n" not in text
    return text.removeprefix(f"{str(path)!r:.300}: ")


ALTERED = "sha256: is not that of the content, which has been altered"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"steps": 320', '"steps": 321'),
        ('"bound": 0.0094', '"bound": 0.0093'),
        ('"max_context": 512', '"max_context": 256'),
        ('"expires": "2026', '"expires": "2027'),
        ('"torch": "', '"torch": "9'),
    ],
)
def test_an_edited_file(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    assert message(file) == ALTERED


def test_any_edited_digit_of_a_digest(file: Path) -> None:
    stored = json.loads(file.read_text())
    for name in ("sources", "plan", "checkpoint", "deployment"):
        digest = stored["facts"][name]
        other = ("1" if digest[0] == "0" else "0") + digest[1:]
        file.write_text(json.dumps(stored | {"facts": stored["facts"] | {name: other}}))
        assert message(file) == ALTERED


def test_layout_and_order_of_the_json_do_not_matter(file: Path) -> None:
    before = read(file)
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(stored.items())), separators=(",", ":")))
    assert read(file) == before


def test_signatures(tmp_path: Path, served: Facts, file: Path) -> None:
    assert message(file, KEY) == "hmac: missing, and a key is set"
    certificate(served, KEY).write(file)
    assert read(file, KEY).unsigned(KEY) is None
    assert read(file).unsigned(None) is None  # nobody asks for a signature without a key
    assert message(file, b"another key of many bytes") == "hmac: is not that of the content under this key"

    # an edit that knows how to make a SHA-256 does not know the key
    stored = json.loads(file.read_text())
    stored["expires"] = "2036-01-01T00:00:00Z"
    body = {name: value for name, value in stored.items() if name not in ("sha256", "hmac")}
    file.write_text(json.dumps(stored | {"sha256": seal(body)}))
    assert read(file).expires.year == 2036
    assert message(file, KEY) == "hmac: is not that of the content under this key"


def test_comparisons_take_constant_time(served: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    seen = []
    whole = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: seen.append((a, b)) or whole(a, b))
    signed = certificate(served, KEY)
    assert signed.unsigned(KEY) is None
    assert [len(a) for a, _ in seen] == [64, 64]


# reading: files


def test_a_path_that_is_no_regular_file(tmp_path: Path, file: Path) -> None:
    assert message(tmp_path) == "expected a regular file, got a directory"
    link = tmp_path / "link.json"
    link.symlink_to(file)
    assert message(link) == "expected a regular file, got a symbolic link"
    dangling = tmp_path / "dangling.json"
    dangling.symlink_to(tmp_path / "nothing")
    assert message(dangling) == "expected a regular file, got a symbolic link"
    os.mkfifo(tmp_path / "pipe")  # read without waiting for a writer
    assert message(tmp_path / "pipe") == "expected a regular file, got a pipe or a device"
    assert message("/dev/zero") == "expected a regular file, got a pipe or a device"
    assert message(tmp_path / "missing") == "expected a readable file: No such file or directory"
    assert message("") == "expected a readable file: No such file or directory"
    assert message("a\0b") == "expected the path of a file: embedded null byte"


def test_no_file_is_left_open(tmp_path: Path, file: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    read(file)
    message(tmp_path)
    message("/dev/zero")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_huge_file(tmp_path: Path) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as opened:
        opened.truncate(1 << 40)  # a terabyte of holes
    assert message(huge) == f"expected at most {MOST_BYTES} bytes, got more"


def test_nesting(tmp_path: Path, file: Path) -> None:
    deep = tmp_path / "deep.json"
    for text in ("[" * 100_000, '{"a":' * 100_000, "[" * 9 + "]" * 9):
        deep.write_text(text)
        assert message(deep) == "expected JSON nested at most 8 deep, got deeper"
    deep.write_text("[" * 8 + "]" * 8)
    assert message(deep) == "certificate: expected an object, got [[[[[[[[]]]]]]]]"
    # brackets within a string do not nest
    deep.write_text(json.dumps({'"' + "[" * 50: 1}))
    assert message(deep).endswith("unknown field")


@pytest.mark.parametrize(
    "text",
    [
        '"' + '\\"' * 500_000,  # every quote begins a string that does not end
        '"' * 1_000_000,
        "{" + ",".join(f'"{k}":1' for k in range(90_000)) + ',"89999":1}',
        '{"a":' + "9" * 1_000_000 + "}",
        '{"a":' + "[]," * 300_000,
    ],
    ids=["open strings", "quotes", "names", "digits", "lists"],
)
def test_a_hostile_file_takes_no_long_time(tmp_path: Path, text: str) -> None:
    """A pass over a megabyte takes tens of milliseconds; one pass for every character takes hours."""
    path = tmp_path / "c.json"
    path.write_text(text)
    start = time.process_time()
    message(path)
    assert time.process_time() - start < 5


@given(st.data())
@settings(max_examples=300)
def test_one_byte_changed_is_refused_or_means_the_same(served: Facts, data: st.DataObject) -> None:
    """A changed byte of white space may leave the meaning; nothing else passes."""
    signed = certificate(served, KEY)
    whole = json.loads(signed.sealed()) | {"sha256": signed.sha256, "hmac": signed.hmac}
    stored = bytearray(json.dumps(whole).encode())
    stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.json"
        path.write_bytes(stored)
        try:
            certified = read(path, KEY)
        except CertificateError:
            return
    assert certified == signed


def test_names_that_come_twice(file: Path) -> None:
    text = file.read_text()
    file.write_text(text.replace('"steps": 320', '"steps": 1, "steps": 320'))
    assert message(file) == "'steps': expected once, got it twice"
    file.write_text(text.replace('"schema": 1', '"schema": 1, "schema": 1'))
    assert message(file) == "'schema': expected once, got it twice"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "expected JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"\xff{}", "expected UTF-8, got byte 255 at 0"),
        (
            b"\xef\xbb\xbf{}",
            "expected JSON: Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)",
        ),
        (b"{} {}", "expected JSON: Extra data: line 1 column 4 (char 3)"),
        (b"null", "certificate: expected an object, got None"),
        (b'{"a": NaN}', "expected finite numbers, got NaN"),
        (b'{"a": -Infinity}', "expected finite numbers, got -Infinity"),
        (b"{}", "schema: missing"),
        (b'{"schema": ' + b"9" * 5000 + b"}", None),
        (b'{"schema": "\\ud800"}', "facts: missing"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_certificate_at_all(tmp_path: Path, content: bytes, reason: str | None) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content)
    assert message(path) == reason if reason else message(path).startswith("expected JSON: ")


def field_names(stored: dict[str, Any]) -> list[tuple[str, ...]]:
    inner = [(part, name) for part in ("facts", "evidence") for name in stored[part]]
    return [(name,) for name in stored] + inner


def test_every_field_is_needed_and_no_other(file: Path) -> None:
    stored = json.loads(file.read_text())
    names = field_names(stored)
    assert len(names) == 7 + len(fields(Facts)) + len(fields(Evidence))
    for where in names:
        copy = json.loads(file.read_text())
        inner = copy[where[0]] if len(where) == 2 else copy
        del inner[where[-1]]
        path = file.with_name("less.json")
        path.write_text(json.dumps(copy))
        assert message(path) == f"{'.'.join(where)}: missing"
    for where in ((), ("facts",), ("evidence",)):
        copy = json.loads(file.read_text())
        (copy[where[0]] if where else copy)["more\n"] = 1
        path.write_text(json.dumps(copy))
        assert message(path) == f"{''.join(f'{w}.' for w in where)}'more\\n': unknown field"


def test_every_field_of_another_type(file: Path) -> None:
    """Each field takes one type; all of JSON's others are refused by the field's name."""
    names = field_names(json.loads(file.read_text()))
    values = [None, True, -1, 1.5, "", [[]], {}]
    for where in names:
        refused = 0
        for value in values:
            copy = json.loads(file.read_text())
            inner = copy[where[0]] if len(where) == 2 else copy
            if inner[where[-1]] is value:  # hmac is null already
                refused += 1
                continue
            inner[where[-1]] = value
            path = file.with_name("other.json")
            path.write_text(json.dumps(copy))
            text = message(path)  # a value of the right type is at least another content
            refused += text.startswith(".".join(where))
        assert refused >= len(values) - 1, where


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("schema", 2, "schema: expected 1, got 2"),
        ("schema", True, "schema: expected 1, got True"),
        ("issued", "2026-3-1T12:00:00Z", "issued: expected a date as 2026-01-31T12:00:00Z"),
        ("issued", "2026-02-30T12:00:00Z", "issued: expected a date as 2026-01-31T12:00:00Z"),
        ("expires", "2026-03-01T12:00:00+09:00", "expires: expected a date as 2026-01-31T12:00:00Z"),
        ("sha256", "A" * 64, "sha256: expected 64 hexadecimal digits"),
        ("hmac", "", "hmac: expected 64 hexadecimal digits"),
    ],
)
def test_fields_of_another_form(file: Path, name: str, value: object, reason: str) -> None:
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | {name: value}))
    assert message(file).startswith(reason)


def test_a_slot_that_comes_twice(file: Path) -> None:
    stored = json.loads(file.read_text())
    stored["facts"]["sides"].append(["embed", "reference"])
    file.write_text(json.dumps(stored))
    assert message(file) == "facts.sides: expected every name once, got one twice"


# covering


def other_side(of: Facts, slot: str) -> Facts:
    flip = {"fast": "reference", "reference": "fast"}
    return replace(of, sides=tuple((name, flip[side] if name == slot else side) for name, side in of.sides))


MISMATCHES: list[tuple[Callable[[Facts], Facts], str]] = [
    (
        lambda f: replace(f, checkpoint="0" * 64),
        "checkpoint: the certificate is for {0.checkpoint:.40}, here it is " + "0" * 40,
    ),
    (
        lambda f: replace(f, plan="0" * 64),
        "plan: the certificate is for {0.plan:.40}, here it is " + "0" * 40,
    ),
    (
        lambda f: replace(f, deployment="0" * 64),
        "deployment: the certificate is for {0.deployment:.40}, here it is " + "0" * 40,
    ),
    (
        lambda f: replace(f, device="NVIDIA H200"),
        "device: the certificate is for cpu, here it is NVIDIA H200",
    ),
    (
        lambda f: replace(f, capability="sm_90"),
        "capability: the certificate is for interpreted, here it is sm_90",
    ),
    (lambda f: replace(f, torch="2.11.0"), "torch: the certificate is for {0.torch}, here it is 2.11.0"),
    (lambda f: replace(f, triton="3.6.0"), "triton: the certificate is for {0.triton}, here it is 3.6.0"),
    (
        lambda f: replace(f, sources="0" * 64),
        "sources: the certificate is for {0.sources:.40}, here it is " + "0" * 40,
    ),
    (
        lambda f: other_side(f, "layer 1 (dense_mlp)"),
        "layer 1 (dense_mlp): the certificate is for the reference arm, here it is the fast arm",
    ),
    (lambda f: replace(f, sides=f.sides[:-1]), "sides: the certificate lists other slots"),
    (lambda f: replace(f, widths=(8, 16, 32)), "width 32: the certificate is for 8, 16"),
    (lambda f: replace(f, max_context=528), "max_context 528: the certificate is for at most 512"),
]


@pytest.mark.parametrize("place", range(len(MISMATCHES)), ids=[m.split(":")[0] for _, m in MISMATCHES])
def test_a_mismatch_in_words(served: Facts, place: int) -> None:
    change, words = MISMATCHES[place]
    assert certificate(served).covers(change(served), NOW) == words.format(served)


def test_the_first_mismatch_is_named(served: Facts) -> None:
    here = served
    for change, words in reversed(MISMATCHES):
        if not words.startswith("sides"):  # which hides the one before it
            here = change(here)
            assert certificate(served).covers(here, NOW + timedelta(days=99)) == words.format(served)


def test_every_fact_is_compared(served: Facts) -> None:
    changed = {f.name for f in fields(Facts) for change, _ in MISMATCHES
               if getattr(change(served), f.name) != getattr(served, f.name)}  # fmt: skip
    assert changed == {f.name for f in fields(Facts)}


def test_less_than_the_certificate_names_is_covered(served: Facts) -> None:
    assert certificate(served).covers(replace(served, widths=(16,), max_context=256), NOW) is None


def test_dates(served: Facts) -> None:
    issued = certificate(served)
    second = timedelta(seconds=1)
    assert issued.covers(served, issued.issued) is None
    assert issued.covers(served, issued.expires - second) is None
    assert issued.covers(served, issued.issued - second) == (
        "not valid before 2026-03-01T11:00:00Z, it is 2026-03-01T10:59:59Z"
    )
    assert (
        issued.covers(served, issued.expires) == "expired at 2026-03-31T12:00:00Z, it is 2026-03-31T12:00:00Z"
    )
    with pytest.raises(ValueError, match="now: expected a date with a time zone"):
        issued.covers(served, NOW.replace(tzinfo=None))


def test_a_certificate_cannot_be_changed_in_memory(served: Facts) -> None:
    issued = certificate(served)
    with pytest.raises(CertificateError, match="has been altered"):
        replace(issued, expires=issued.expires + HOUR)
    # the same clock time in another zone is another time
    with pytest.raises(CertificateError, match="has been altered"):
        replace(issued, expires=issued.expires.replace(tzinfo=timezone(timedelta(hours=-12))))


# facts


def test_the_facts_of_an_embedded_checkpoint(served: Facts) -> None:
    import torch
    import triton

    model = embedded("m3.1")
    assert served.checkpoint == model.checkpoint.digest
    assert (served.device, served.capability) == ("cpu", "interpreted")
    assert (served.torch, served.triton) == (torch.__version__, triton.__version__)
    assert (served.widths, served.max_context) == (SERVED.widths, SERVED.max_context)
    assert [slot for slot, _ in served.sides] == [str(slot) for slot in model.plan.slots]
    assert facts("m3.1") == served


def test_each_checkpoint_has_its_own_facts(served: Facts) -> None:
    other = facts("m3")
    assert other.checkpoint != served.checkpoint
    assert other.plan != served.plan
    assert certificate(other).covers(served, NOW) == (
        f"checkpoint: the certificate is for {other.checkpoint:.40}, here it is {served.checkpoint:.40}"
    )


@pytest.fixture
def copy_of_mono(tmp_path: Path) -> Path:
    shutil.copytree(PACKAGE, tmp_path / "mono", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "mono"


def test_any_byte_of_any_source_file_matters(copy_of_mono: Path) -> None:
    before = sources_digest(copy_of_mono)
    assert before == sources_digest()
    for name in (
        "fast/ops/experts.py",
        "layers/moe.py",
        "formats/mxfp4.py",
        "models/packing.py",
        "decode.py",
    ):
        path = copy_of_mono / name
        text = path.read_bytes()
        path.write_bytes(text[:-1] + b" ")
        assert sources_digest(copy_of_mono) != before, name
        path.write_bytes(text)
    assert sources_digest(copy_of_mono) == before


def test_a_renamed_or_an_added_source_file_matters(copy_of_mono: Path) -> None:
    before = sources_digest(copy_of_mono)
    (copy_of_mono / "fast" / "one_more.py").write_text("")
    assert sources_digest(copy_of_mono) != before
    (copy_of_mono / "fast" / "one_more.py").unlink()
    (copy_of_mono / "fast" / "moe.py").rename(copy_of_mono / "fast" / "moe2.py")
    assert sources_digest(copy_of_mono) != before


def test_no_source_files_are_no_fact(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="sources: expected source files"):
        sources_digest(tmp_path)


def test_a_launch_setting_in_use_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    from mono.fast.tiles import TILES

    before = sources_digest()
    monkeypatch.setitem(TILES["gate_up"]["gpu"], "BLOCK_K", 256)
    assert sources_digest() != before


def test_every_size_of_a_plan_matters() -> None:
    plan = embedded("m3").plan
    seen = {plan_fingerprint(plan)}
    slot = plan.slots[8]
    for field in fields(slot.spec):
        value = getattr(slot.spec, field.name)
        other = {str: "other", bool: not value}.get(
            type(value), value + 1 if isinstance(value, int | float) else 0
        )
        slots = (
            *plan.slots[:8],
            replace(slot, spec=replace(slot.spec, **{field.name: other})),
            *plan.slots[9:],
        )
        seen.add(plan_fingerprint(replace(plan, slots=slots)))
    assert len(seen) == 1 + len(fields(slot.spec))


def test_every_field_of_a_deployment_matters_but_those_in_clear() -> None:
    others: dict[str, Any] = {
        "tp_size": 2,
        "linears": "checkpoint",
        "expert_activations": "bf16",
        "shared_expert": "apart",
        "kv_format": "bf16",
        "verify": "off",
        "draft_len": 3,
        "prefix": "fast",
    }
    assert {*others, "widths", "max_context"} == {f.name for f in fields(SERVED)}
    prints = {deployment_fingerprint(replace(SERVED, **{name: other})) for name, other in others.items()}
    assert len(prints - {deployment_fingerprint(SERVED)}) == len(others)
    assert deployment_fingerprint(replace(SERVED, widths=(16,), max_context=64)) == deployment_fingerprint(
        SERVED
    )


def test_mono_makes_no_evidence() -> None:
    """Only the reader of files constructs Evidence, and nothing calls `issue`."""
    for path in PACKAGE.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = [
            f.id if isinstance(f, ast.Name) else f.attr
            for f in calls
            if isinstance(f, ast.Name | ast.Attribute)
        ]
        assert names.count("Evidence") == (path.name == "certificate.py"), path
        assert "issue" not in names, path


def test_the_public_name_is_the_class() -> None:
    import mono

    assert mono.Certificate is Certificate
