"""The tables `[models.NAME]` of the TOML file: models of one server, each with settings of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from luce.config.file import read_file
from luce.config.settings import FIELDS
from luce.errors import UsageError

#: groups of settings that the models of a server share
SHARED = ("server", "cluster", "log")
_NAME = re.compile(r"[^\s,]+")


@dataclass(frozen=True)
class ModelTable:
    """One model of a server."""

    #: what requests call it
    name: str
    #: what `luce pull` calls it: a path, or a name
    model: str
    #: loaded at the start, and never unloaded to make room
    pinned: bool = False
    #: seconds without a request after which it is unloaded; 0: never
    ttl: float = 0.0
    #: settings that differ from those of the server
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: where they come from, for messages
    origin: str = ""


def read_tables(path: Path) -> list[ModelTable]:
    """The tables of a file, in its order. Raises one UsageError that holds every problem found."""
    content = read_file(path).get("models", {})
    problems: list[str] = []
    found: list[ModelTable] = []
    if not isinstance(content, dict):
        raise UsageError(f"{path}: models: expected tables [models.NAME]", param="models")
    for name, table in content.items():
        where = f"{path}: models.{name}"
        if not isinstance(table, dict) or not _NAME.fullmatch(name):
            problems.append(f"{where}: expected a table, with a name without commas and spaces")
            continue
        try:
            found.append(_table(name, {key.replace("-", "_"): value for key, value in table.items()}, where))
        except UsageError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("; ".join(problems), param="models")
    return found


def _table(name: str, values: dict[str, Any], where: str) -> ModelTable:
    model, pinned, ttl = values.pop("model", None), values.pop("pinned", False), values.pop("ttl", 0)
    if not isinstance(model, str) or not model:
        raise UsageError(f"{where}.model: expected a path or a name of a model, got {model!r}", param="model")
    if not isinstance(pinned, bool):
        raise UsageError(f"{where}.pinned: expected true or false, got {pinned!r}", param="pinned")
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 <= ttl <= 1e9:
        raise UsageError(f"{where}.ttl: expected seconds, got {ttl!r}", param="ttl")
    for key in values:
        if key != "alias" and key in FIELDS and FIELDS[key].metadata["group"] in SHARED:
            raise UsageError(f"{where}.{key}: is a setting of the server, not of one model", param=key)
    alias = values.get("alias", [])
    if not isinstance(alias, list) or not all(isinstance(item, str) for item in alias):
        raise UsageError(f"{where}.alias: expected a list of names, got {alias!r}", param="alias")
    return ModelTable(name, model, pinned, float(ttl), {**values, "alias": [name, *alias]}, where)
