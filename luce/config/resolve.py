"""A Config from its origins: flags or keywords, environment, file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from luce.config import conflicts
from luce.config.environment import NO_SETTINGS, variables
from luce.config.file import read_file
from luce.config.settings import FIELDS, Config, flag, is_bool
from luce.config.suggest import nearest
from luce.errors import UsageError

#: shares belong to a list of devices, so an origin that names devices replaces all of these settings of weaker origins
_PLACEMENT = ("target_device", "target_devices", "target_layer_split")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _parse(field: dataclasses.Field[Any], value: Any, origin: str) -> Any:
    """Check one value from any origin. Raises UsageError naming the origin."""
    if value is None and field.default is None:
        return None
    if is_bool(field):
        if isinstance(value, bool):
            return value
        lowered = str(value).lower()
        if lowered in _TRUE or lowered in _FALSE:
            return lowered in _TRUE
        raise UsageError(f"{origin}: expected true or false, got {value!r}", param=field.name)
    if isinstance(value, bool):
        raise UsageError(f"{origin}: expected {field.metadata['metavar']}, got {value!r}", param=field.name)
    if isinstance(value, list | tuple):
        if not isinstance(field.default, tuple):
            raise UsageError(f"{origin}: expected one value, got {value!r}", param=field.name)
        if not value:
            return ()
        value = ",".join(str(v) for v in value)
    try:
        return field.metadata["parse"](str(value))
    except ValueError as error:
        raise UsageError(f"{origin}: {error}, got {str(value)!r}", param=field.name) from None


def _meant(name: str, name_of: Callable[[str], str]) -> str:
    """The setting that may be meant by a name, as its origin spells it."""
    return nearest(name, FIELDS, lambda found: name_of(found).rpartition(": ")[2])


def config_file(given: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Path | None:
    """The TOML file of the settings, None if there is none."""
    path = given.get("config") or (variables() if env is None else env).get("LUCE_CONFIG")
    return Path(path) if path else None


def resolve(
    given: Mapping[str, Any],
    *,
    spell: Callable[[str], str] = flag,
    env: Mapping[str, str] | None = None,
    table: tuple[Mapping[str, Any], str] | None = None,
) -> Config:
    """The Config from flags or keywords, environment and file. Raises one UsageError that holds every problem found.

    `spell` is the name of a field in messages: a flag by default, the bare keyword for luce.load. `table`: settings of
    one model of a server, which are stronger than all others, and where they come from.
    """
    env = variables() if env is None else env
    given = dict(given)
    problems: list[str] = []
    params: list[str] = []
    layers: list[tuple[dict[str, Any], Callable[[str], str]]] = []
    path = config_file(given, env)
    given.pop("config", None)
    if path:
        try:
            content = {key.replace("-", "_"): value for key, value in read_file(path).items() if key != "models"}
            layers.append((content, lambda name: f"{path}: {name}"))
        except UsageError as error:
            problems.append(str(error))
            params.append("config")
    layers.append(
        (
            {
                n.removeprefix("LUCE_").lower(): v
                for n, v in env.items()
                if n.startswith("LUCE_") and n not in NO_SETTINGS
            },
            lambda n: f"LUCE_{n.upper()}",
        )
    )
    layers.append((given, spell))
    if table is not None:
        settings, origin = table
        layers.append((dict(settings), lambda name: f"{origin}.{name}"))
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for content, name_of in layers:
        if "target_device" in content or "target_devices" in content:
            for name in _PLACEMENT:
                values.pop(name, None)
        own: dict[str, Any] = {}
        for name, value in content.items():
            spelled[name] = name_of(name)
            try:
                if name not in FIELDS:
                    raise UsageError(f"{name_of(name)}: no such setting{_meant(name, name_of)}", param=name)
                own[name] = _parse(FIELDS[name], value, name_of(name))
            except UsageError as error:
                problems.append(str(error))
                params.append(name)
        # Where a stronger origin turns a feature off, weaker origins' settings of that feature no longer count.
        for name in conflicts.disabled(own):
            values.pop(name, None)
        values |= own
    for name, problem in conflicts.problems(values, spelled, frozenset(params)):
        problems.append(problem)
        params.append(name)
    if problems:
        raise UsageError("; ".join(problems), param=params[0])
    return Config(**values)
