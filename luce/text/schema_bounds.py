"""Bounds of numbers in JSON schemas, as the grammar library takes them."""

from __future__ import annotations

import math
from typing import Any

_Json = dict[str, Any]

#: Integers have 19 digits at most; without bounds, a model whose favourites are digits writes them to the limit. The
#: largest double below 2**63: the library computes bounds in doubles.
_LARGEST_INTEGER = 2**63 - 1024
#: stands for the numbers beside 0 where 0 itself is excluded
_SMALLEST = 1e-15


def number_bounds(made: _Json) -> None:
    """Make numbers of draft 4's exclusive bounds, which are flags of the others."""
    for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(made.get(flag), bool):
            exclusive_bound = made.pop(flag)
            if exclusive_bound and bound in made:
                made[flag] = made.pop(bound)


def close_bounds(made: _Json) -> None:
    """Make inclusive bounds of those exclusive ones that the library allows: whole ones, where the other bound has the
    same whole part."""
    low = max((made[key] for key in ("minimum", "exclusiveMinimum") if key in made), default=None)
    high = min((made[key] for key in ("maximum", "exclusiveMaximum") if key in made), default=None)
    if low is None or high is None or low >= high or math.trunc(low) != math.trunc(high):
        return
    for key, bound, sign, value in (("exclusiveMinimum", "minimum", 1, low), ("exclusiveMaximum", "maximum", -1, high)):
        if made.get(key) == value == math.trunc(value):
            del made[key]
            # The double beside 0 has 324 digits.
            made[bound] = math.nextafter(value, sign * math.inf) if value else sign * _SMALLEST


def bound_integers(made: _Json) -> None:
    """Give integers the bounds that they lack."""
    for key in ("minimum", "exclusiveMinimum"):
        # Such as -2**63, with which the library refuses the whole schema of the integer.
        if made.get(key, 0) < -_LARGEST_INTEGER:
            del made[key]
    low = max((made[key] for key in ("minimum", "exclusiveMinimum") if key in made), default=None)
    high = min((made[key] for key in ("maximum", "exclusiveMaximum") if key in made), default=None)
    if low is None and (high is None or high > -_LARGEST_INTEGER):
        made["minimum"] = -_LARGEST_INTEGER
    if high is None and (low is None or low < _LARGEST_INTEGER):
        made["maximum"] = _LARGEST_INTEGER
