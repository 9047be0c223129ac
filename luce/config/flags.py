"""Settings as flags of a command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from luce.config.settings import FIELDS, flag, is_bool


def add_flags(parser: argparse.ArgumentParser, groups: Iterable[str]) -> None:
    """Add the flags of the named groups (and `--config`) to a parser; absent flags stay out of the namespace."""
    parser.add_argument(
        "--config", metavar="FILE", type=Path, default=argparse.SUPPRESS, help="TOML file with settings"
    )
    for group in groups:
        section = parser.add_argument_group(group)
        for field in FIELDS.values():
            meta = field.metadata
            if meta["group"] != group:
                continue
            names = [flag(field.name), *("--" + alias for alias in meta["flags"])]
            options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
            if is_bool(field):
                section.add_argument(*names, action=argparse.BooleanOptionalAction, help=meta["help"], **options)
                continue
            shown = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
            text = (
                meta["help"]
                if shown in (None, "") or "default" in meta["help"]
                else f"{meta['help']} (default: {shown})"
            )
            if isinstance(field.default, tuple):
                options["action"] = "append"
            section.add_argument(*names, metavar=meta["metavar"], help=text.replace("%", "%%"), **options)
