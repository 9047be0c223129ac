"""Sampling values by name, as `-o K=V` of `luce run` and `luce chat`, and `/set K V` in a chat take them."""

from __future__ import annotations

import argparse
from typing import Any

from luce.config.sampling import SAMPLERS
from luce.config.settings import flag
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


def parse_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """-o, -n and --seed as keywords of Model.generate. Raises one UsageError that holds every problem."""
    given: dict[str, Any] = {}
    problems: list[UsageError] = []
    try:
        given = parse_pairs(arguments.option)
    except UsageError as error:
        problems.append(error)
    for name in ("max_tokens", "seed"):
        text = getattr(arguments, name)
        if text is not None:
            try:
                given[name] = parse(name, text, flag(name))
            except UsageError as error:
                problems.append(error)
    raise_together(problems)
    return given


def raise_together(problems: list[UsageError]) -> None:
    """Raise the problems as one error, if there are any."""
    if problems:
        raise UsageError("; ".join(map(str, problems)), param=problems[0].param)
