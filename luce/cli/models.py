"""`luce models`: the models on this machine, and models to begin with."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rich.table import Table
from rich.text import Text

from luce.cli.arguments import add_json
from luce.cli.console import output
from luce.cli.plain_writer import printable
from luce.hub.installed import InstalledModel, installed
from luce.hub.removal import incomplete
from luce.hub.reporting import size_text
from luce.models.recommended import AS_OF, RECOMMENDED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--recommended and --json."""
    parser.add_argument("--recommended", action="store_true", help="models to begin with, by the memory that they need")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a table, or a JSON list."""
    if arguments.recommended:
        _show_recommended(as_json=arguments.json)
        return 0
    models, parts = installed(), list(incomplete())
    if arguments.json:
        print(json.dumps([_facts(model) for model in models], indent=2))
        return 0
    console = output()
    if models:
        console.print(_table(models))
    else:
        console.print("No models yet: `luce models --recommended` names some, `luce pull MODEL` downloads one.")
    if parts:
        size = size_text(sum(path.stat().st_size for path in parts))
        console.print(
            f"{len(parts)} downloads did not end ({size}): `luce pull` goes on with them, `luce rm --incomplete` "
            "removes them.",
            soft_wrap=True,
        )
    return 0


def _facts(model: InstalledModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "title": model.title,
        "place": model.place,
        "path": str(model.files[0]),
        "files": len(model.files),
        "bytes": model.size,
        "modified": model.modified,
    }


def _table(models: list[InstalledModel]) -> Table:
    table = Table("MODEL", "size", "from", "changed", box=None, padding=(0, 2, 0, 0))
    table.columns[0].overflow = "fold"
    table.columns[1].justify = "right"
    for model in models:
        place = f"{model.place}: {model.title}" if model.title else model.place
        changed = time.strftime("%Y-%m-%d", time.localtime(model.modified))
        # Names come from other programs' folders.
        table.add_row(Text(printable(model.name)), size_text(model.size), Text(printable(place)), changed)
    return table


def _show_recommended(*, as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "name": model.name,
                "model": model.model,
                "bytes": model.size,
                "memory_gb": model.memory,
                "family": model.family,
                "licence": model.licence,
            }
            for model in RECOMMENDED
        ]
        print(json.dumps(rows, indent=2))
        return
    table = Table("memory", "MODEL", "size", "family", "licence", box=None, padding=(0, 2, 0, 0))
    table.columns[0].justify = table.columns[2].justify = "right"
    for model in RECOMMENDED:
        table.add_row(f"{model.memory} GB", model.name, size_text(model.size), model.family, model.licence)
    console = output()
    console.print(table)
    console.print(f"Memory of all devices together, with a context of 8,192 tokens. As of {AS_OF}.", soft_wrap=True)
