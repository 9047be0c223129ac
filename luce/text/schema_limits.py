"""Limits of JSON schemas: what is larger takes seconds to compile, or more memory than a reply is worth."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from luce.errors import LuceError

#: levels of schemas inside schemas
MAX_DEPTH = 64
MAX_SCHEMAS = 20_000
MAX_PROPERTIES = 2_000
#: The library takes about 2,000 items at a place, and an optional property takes four.
MAX_OPTIONAL = 400
MAX_VALUES = 10_000
MAX_VALUE_BYTES = 256 << 10
MAX_PATTERN = 4_096
MAX_REPEATS = 10_000
#: A million takes 6 s to compile.
MAX_NESTED_REPEATS = 100_000
MAX_COUNT = 100_000
#: A multiple of six digits takes 10 s to compile, and 480 MB.
MAX_MULTIPLE_DIGITS = 4
#: ways to combine the arms of anyOf and oneOf under one allOf
MAX_ARMS = 1_000

_REPEATS = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def bounded_int(digits: str, most: int) -> int:
    """The number that decimal digits write, or `most` + 1 if that is less: Python reads none of thousands of digits."""
    kept = digits.lstrip("0")
    return min(int(kept or "0"), most + 1) if len(kept) <= len(str(most)) else most + 1


class SchemaError(LuceError):
    """A schema that cannot hold a reply. `path`: of the keyword in the schema, such as `.properties.a.minLength`."""

    def __init__(self, path: str, reason: str, code: str) -> None:
        super().__init__(reason, code=code)
        self.path = path


def too_complex(path: str, reason: str) -> SchemaError:
    """The error for what is beyond a limit."""
    return SchemaError(path, reason, "schema_too_complex")


def check_count(path: str, count: int) -> None:
    """Raises SchemaError for a count of characters, items or properties beyond the limit."""
    if count > MAX_COUNT:
        raise too_complex(path, f"expected at most {MAX_COUNT:,}")


def check_multiple(path: str, multiple: float) -> None:
    """Raises SchemaError for a multiple with too many digits."""
    digits = f"{multiple:.15g}".partition("e")[0].replace(".", "").strip("0")
    if len(digits) > MAX_MULTIPLE_DIGITS:
        raise too_complex(path, f"expected at most {MAX_MULTIPLE_DIGITS} significant digits")


def check_properties(path: str, properties: dict[str, Any], required: list[str]) -> None:
    """Raises SchemaError for too many properties, or too many optional ones."""
    if len(properties) > MAX_PROPERTIES:
        raise too_complex(path, f"has {len(properties):,} properties, expected at most {MAX_PROPERTIES:,}")
    optional = len(properties.keys() - set(required))
    if optional > MAX_OPTIONAL:
        raise too_complex(path, f"has {optional:,} optional properties, expected at most {MAX_OPTIONAL:,}")


def check_values(path: str, values: list[Any]) -> None:
    """Raises SchemaError for too many values of an enum, or too large ones."""
    if len(values) > MAX_VALUES:
        raise too_complex(path, f"has {len(values):,} values, expected at most {MAX_VALUES:,}")
    encoded = len(msgspec.json.encode(values))
    if encoded > MAX_VALUE_BYTES:
        raise too_complex(path, f"has {encoded >> 10:,} KiB, expected at most {MAX_VALUE_BYTES >> 10}")


def check_pattern(path: str, pattern: str) -> None:
    """Raises SchemaError for a pattern that is long, or whose repetitions multiply."""
    if len(pattern) > MAX_PATTERN:
        raise too_complex(path, f"has {len(pattern):,} characters, expected at most {MAX_PATTERN:,}")
    worst = _repeats(pattern)
    if worst.single > MAX_REPEATS:
        raise too_complex(path, f"repeats {worst.single:,} times, expected at most {MAX_REPEATS:,}")
    if worst.nested > MAX_NESTED_REPEATS:
        raise too_complex(path, f"repeats {worst.nested:,} times in all, expected at most {MAX_NESTED_REPEATS:,}")


class _Repeats(NamedTuple):
    single: int
    #: product of the repetitions around one element
    nested: int


def _repeats(pattern: str) -> _Repeats:
    """The largest repetition counts of a regular expression."""
    single, at, in_class = 1, 0, False
    #: of each open group, and of the whole: the largest nested count so far
    levels = [1]
    #: the nested count of the element just read
    last = 1
    while at < len(pattern):
        char = pattern[at]
        found = None if in_class else _REPEATS.match(pattern, at)
        if char == "\\":
            at, last = at + 2, 1
            continue
        if found is not None:
            count = int(found[2] or found[1])
            single, last = max(single, count), last * max(count, 1)
            at = found.end()
        else:
            if in_class or char == "[":
                in_class, last = char != "]", 1
            elif char == "(":
                levels.append(1)
            elif char == ")" and len(levels) > 1:
                last = levels.pop()
            elif char not in "*+?":
                last = 1
            at += 1
        levels[-1] = max(levels[-1], last)
    return _Repeats(single, max(levels))
