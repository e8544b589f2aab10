"""Saying no: for good, with every reason, or for one step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refused:
    """This deployment does not run on the fast arms, and why. Falsy."""

    reasons: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.reasons:
            raise ValueError("Refused: expected at least one reason, got none")

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return "; ".join(self.reasons)


@dataclass(frozen=True, slots=True)
class Declined:
    """This one step goes to the original path, and why. Falsy."""

    reason: str

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.reason
