"""How much a JSON text would build, counted without building it.

Decoding is one call that holds the interpreter lock, so it stops all streams. Objects and lists take most of its time:
0.1 us each, as long as 100 characters of a string; an escape takes a tenth of that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

#: most objects and lists of a body
CONTAINERS = 500_000
#: most commas outside strings: values of lists and fields of objects
VALUES = 1_000_000
#: most backslashes
BACKSLASHES = 10_000_000

#: bytes of one step: other threads run between two steps.
STEP = 256 << 10
# A whole string; or the begin of one, of which the quote is kept.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"|(").*', re.DOTALL)


def too_many(body: bytes) -> str:
    """What a body has too many of, for a message; empty if it can be decoded."""
    if _count(body, b"\\") > BACKSLASHES:
        return f"more than {BACKSLASHES} backslashes"
    # Strings hold these characters too; most bodies have so few that it does not matter.
    if _count(body, b"[", b"{") <= CONTAINERS and _count(body, b",") <= VALUES:
        return ""
    containers = values = 0
    for part in _outside_strings(body):
        containers += _count(part, b"[", b"{")
        values += _count(part, b",")
        if containers > CONTAINERS:
            return f"more than {CONTAINERS} objects and lists"
        if values > VALUES:
            return f"more than {VALUES} values"
    return ""


def _count(body: bytes, *characters: bytes) -> int:
    steps = range(0, len(body), STEP)
    return sum(body.count(character, at, at + STEP) for at in steps for character in characters)


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """The body without its strings, in steps."""
    inside, held = False, b""
    for at in range(0, len(body), STEP):
        part = (b'"' if inside else b"") + held + body[at : at + STEP]
        # A backslash belongs to the character behind it.
        held = b"\\" if (len(part) - len(part.rstrip(b"\\"))) % 2 else b""
        rest, quote, _ = _STRING.sub(rb"\1", part.removesuffix(held)).partition(b'"')
        inside = bool(quote)
        yield rest
