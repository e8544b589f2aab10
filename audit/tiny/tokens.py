"""Bytes as tokens: the vocabulary of the embedded checkpoints.

A text is its UTF-8 bytes, ids 0..255. Four ids follow, then columns that exist only because the embedding and
the head are padded to `ROWS` rows; no token has their ids and no decoder may emit them.
"""

from collections.abc import Iterable

BOS = 256  # starts a document
EOS = 257  # ends a problem's answer
PAD = 258  # fills a batch; never in a text
NOISE = 259  # the drafter's place holder for a token not yet known
TOKENS = 260  # ids below this are tokens
ROWS = 264  # rows of the embedding and the head


def encode(text: str) -> list[int]:
    """The UTF-8 bytes of `text`, without BOS or EOS."""
    return list(text.encode())


def decode(ids: Iterable[int]) -> str:
    """The text of `ids`; BOS, EOS, PAD and NOISE have none, broken UTF-8 becomes U+FFFD.

    Errors: ValueError, naming the id and its place, for an id that is no token.
    """
    kept = []
    for place, token in enumerate(ids):
        if not 0 <= token < TOKENS:
            raise ValueError(f"tokens: expected ids 0..{TOKENS - 1}, got {token} at place {place}")
        if token < BOS:
            kept.append(token)
    return bytes(kept).decode(errors="replace")
