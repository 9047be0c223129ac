"""Sampling values by name, as `luce run -o K=V` and `/set K V` in a chat take them."""

from __future__ import annotations

from typing import Any

from luce.config.sampling import SAMPLERS
from luce.errors import UsageError

#: sampling values that a user may set; each is a keyword of Model.generate
NAMES = tuple(SAMPLERS)


def parse(name: str, text: str, origin: str) -> Any:
    """The value of one name. Raises UsageError that begins with `origin`."""
    name = name.replace("-", "_")
    if name not in SAMPLERS:
        raise UsageError(f"{origin}: expected one of {', '.join(NAMES)}, got {name!r}", param=name)
    try:
        return SAMPLERS[name].parse(text)
    except ValueError as error:
        raise UsageError(f"{origin}: {error}, got {text!r}", param=name) from None


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
    """Raise the problems as one error, if there are any."""
    if problems:
        raise UsageError("; ".join(map(str, problems)), param=problems[0].param)
