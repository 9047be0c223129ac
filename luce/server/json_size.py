"""How much a JSON text would build, counted without building it.

Decoding is one call that holds the interpreter lock, so it stops all streams. LIMITS has what takes about 50 ms of it
each, measured with msgspec 0.22 on one core: keys cost most, because each is a string and a place in a table. The bytes
of strings take as long at 64 MiB.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

#: most of each that a body may have if it has nothing else; what it has of several adds up as shares
LIMITS = {"objects and lists": 500_000, "keys": 200_000, "values": 1_000_000, "backslashes": 5_000_000}
#: bytes of a body of nothing but strings that leave no share for the rest; half of it always stays
LARGEST = 128 << 20

#: bytes of one step: other threads run between two steps.
STEP = 256 << 10
# The values of lists and fields of objects are counted by their commas. Backslashes are in strings only.
_OUTSIDE_STRINGS = {"objects and lists": (b"[", b"{"), "keys": (b":",), "values": (b",",)}
# A whole string; or the begin of one, of which the quote is kept.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"|(").*', re.DOTALL)


def too_many(body: bytes) -> str:
    """What a body has too many of, for a message; empty if it can be decoded."""
    backslashes = Counter({"backslashes": _count(body, b"\\")})
    room = max(1 - len(body) / LARGEST, 0.5)
    # Strings hold these characters too; most bodies have so few that it does not matter.
    if _share(backslashes + _counts(body)) <= room:
        return ""
    counts = backslashes
    for part in _outside_strings(body):
        counts += _counts(part)
        if _share(counts) > room:
            most = max(LIMITS, key=lambda name: counts[name] / LIMITS[name])
            return f"too many {most}: {LIMITS[most]} are the limit, less beside other values and in a large body"
    return ""


def _share(counts: Counter[str]) -> float:
    return sum(counts[name] / limit for name, limit in LIMITS.items())


def _counts(body: bytes) -> Counter[str]:
    return Counter({name: _count(body, *characters) for name, characters in _OUTSIDE_STRINGS.items()})


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
