"""Settings as a TOML file: reading one, and the sample."""

from __future__ import annotations

import logging
import textwrap
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from luce.config.settings import FIELDS, GROUPS
from luce.errors import UsageError

_log = logging.getLogger(__name__)

#: keys of earlier versions, and what they are called now
RENAMED = {"draft_tail": "draft_feature_tail"}


def read_file(path: Path) -> dict[str, Any]:
    """The keys and values of a file, those of earlier versions under their present names. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}", param="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: {error}", param="config") from None

    tables = content.get("models")
    for table in (content, *(tables.values() if isinstance(tables, dict) else ())):
        if isinstance(table, dict):
            _rename(table, path)
    return content


def _rename(table: dict[str, Any], path: Path) -> None:
    """Give the keys of earlier versions their present names. Raises UsageError if a table has both."""
    for key in list(table):
        new = RENAMED.get(key.replace("-", "_"))
        if new is None:
            continue
        if new in table:
            raise UsageError(f"--config {path}: {key} and {new} are the same setting", param=new)
        table[new] = table.pop(key)
        _tell(path, key, new)


@cache
def _tell(path: Path, key: str, new: str) -> None:
    """Say once that a file has a key of an earlier version: it is read several times."""
    _log.warning("%s: %s is called %s now", path, key, new)


def sample() -> str:
    """The sample TOML file: every setting, commented out, with its default (systemd/luce.toml is this text)."""
    lines = ["# Settings of Luce. Each line shows the default; the same names work as flags and as LUCE_<NAME>."]
    for group in GROUPS:
        lines += ["", f"# --- {group}"]
        for field in FIELDS.values():
            if field.metadata["group"] == group:
                lines += textwrap.wrap(field.metadata["help"], 100, initial_indent="# ", subsequent_indent="# ")
                lines.append(f"# {field.name} = {_toml(field.default)}")
    return "\n".join(lines) + "\n"


def _toml(default: Any) -> str:
    """A default as a TOML value."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return "[" + ", ".join(map(_toml, default)) + "]"
    if default is None:
        return '""'
    return f'"{default}"' if isinstance(default, str) else f"{default:g}"
