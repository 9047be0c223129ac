"""Sampling values by name, as `luce run -o K=V` and `/set K V` in a chat take them; ranges are those of requests."""

from __future__ import annotations

from typing import Any

from luce.config.settings import FIELDS
from luce.errors import UsageError

#: values of a request that are no settings: type, lowest, highest
_REQUEST: dict[str, tuple[type[int] | type[float], int, int]] = {
    "frequency_penalty": (float, -2, 2),
    "presence_penalty": (float, -2, 2),
    "seed": (int, -(2**63), 2**63 - 1),
    "max_tokens": (int, 1, 2**31 - 1),
}
_SETTINGS = tuple(name for name, field in FIELDS.items() if field.metadata["group"] == "sampling")
#: keywords of Model.generate that have a value a user may set
NAMES = (*_SETTINGS, *_REQUEST)


def parse(name: str, text: str, origin: str) -> Any:
    """The value of one name. Raises UsageError that begins with `origin`."""
    name = name.replace("-", "_")
    if name not in NAMES:
        raise UsageError(f"{origin}: {name!r} is none of {', '.join(NAMES)}", param=name)
    if name in _SETTINGS:
        try:
            return FIELDS[name].metadata["parse"](text)
        except ValueError as error:
            raise UsageError(f"{origin}: {error}, got {text!r}", param=name) from None
    kind, low, high = _REQUEST[name]
    try:
        value = kind(text)
    except ValueError:
        value = high + 1
    if not low <= value <= high:
        what = "an integer" if kind is int else "a number"
        raise UsageError(f"{origin}: expected {what} in {low}..{high}, got {text!r}", param=name)
    return value


def parse_pairs(pairs: list[str]) -> dict[str, Any]:
    """`K=V` texts as keywords of Model.generate. Raises one UsageError that holds every problem."""
    options: dict[str, Any] = {}
    problems: list[UsageError] = []
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            options[name.replace("-", "_")] = parse(name, text, f"-o {pair}")
        except UsageError as error:
            problems.append(error)
    raise_together(problems)
    return options


def raise_together(problems: list[UsageError]) -> None:
    """Raise what was found, if anything was, as one error."""
    if problems:
        raise UsageError("; ".join(map(str, problems)), param=problems[0].param)
