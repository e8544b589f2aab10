"""A deployment is checked field by field: it is what a certificate names."""

import pytest

from mono.deployment import Deployment


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("tp_size", 0, "an integer of at least 1, got 0"),
        ("tp_size", 2.5, "an integer of at least 1, got 2.5"),
        ("max_context", "4096", "an integer of at least 1, got '4096'"),
        ("max_context", True, "an integer of at least 1, got True"),
        ("draft_len", -1, "an integer of at least 0, got -1"),
        ("widths", (), r"ascending row counts, got \(\)"),
        ("widths", (8, 8), r"ascending row counts, got \(8, 8\)"),
        ("widths", (0, 8), r"ascending row counts, got \(0, 8\)"),
        ("widths", (-8, 8), r"ascending row counts, got \(-8, 8\)"),
        ("widths", (16, 8), r"ascending row counts, got \(16, 8\)"),
        ("widths", ("8",), r"ascending row counts, got \('8',\)"),
        ("widths", (8.5,), r"ascending row counts, got \(8.5,\)"),
        ("widths", [8, 16], r"ascending row counts, got \[8, 16\]"),
        ("kv_format", "fp8", "one of .*, got 'fp8'"),
        ("linears", None, "one of .*, got None"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"^deployment\.{field}: expected {expected}$"):
        Deployment(**{field: value})
