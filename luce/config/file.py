"""Settings as a TOML file: reading one, and the sample."""

from __future__ import annotations

import textwrap
import tomllib
from pathlib import Path
from typing import Any

from luce.config.settings import FIELDS, GROUPS
from luce.errors import UsageError


def read_file(path: Path) -> dict[str, Any]:
    """The keys and values of a file. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}", param="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: {error}", param="config") from None


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
