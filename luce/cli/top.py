"""`luce top`: what a running server does, renewed every second."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from luce.cli.arguments import add_json
from luce.cli.console import output
from luce.cli.plain_writer import printable
from luce.cli.repl.server_client import ServerClient
from luce.cli.server_status import Json, Reading, read, summary
from luce.config.environment import environment
from luce.errors import ServerError, UsageError
from luce.hub.reporting import size_text

_SERVER = "http://127.0.0.1:8080"
_BAR = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The server, how often, and the form."""
    parser.add_argument("--server", metavar="URL", default=_SERVER, help=f"the running server (default: {_SERVER})")
    parser.add_argument(
        "--api-key",
        dest="server_key",
        metavar="KEY",
        help="key of --server, which other users can see (default: $OPENAI_API_KEY)",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="one of the server's models (default: its first, or the one loaded)"
    )
    parser.add_argument(
        "--interval", metavar="SECONDS", type=float, default=1.0, help="time between readings (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="read once and exit")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show the server until Ctrl+C; where no table can be drawn, or with --json, print each reading."""
    if not 0.1 <= arguments.interval <= 3600:
        raise UsageError(f"--interval {arguments.interval:g}: expected 0.1..3600 seconds", param="interval")
    key = arguments.server_key or environment("OPENAI_API_KEY") or ""
    with contextlib.closing(ServerClient(arguments.server, key)) as client:
        if arguments.once:
            _print(summary(read(client, arguments.model), None), as_json=arguments.json)
        elif arguments.json or not sys.stdout.isatty():
            for shown in _readings(client, arguments):
                _print(shown, as_json=arguments.json)
        else:
            with Live(console=Console(highlight=False, markup=False), screen=True, auto_refresh=False) as live:
                for shown in _readings(client, arguments):
                    live.update(page(shown), refresh=True)
    return 0


def _readings(client: ServerClient, arguments: argparse.Namespace) -> Iterable[Json]:
    """Summaries at intervals; {"error": ...} while the server does not answer, if it did at first."""
    before: Reading | None = None
    first = True
    while True:
        try:
            now = read(client, arguments.model)
            yield summary(now, before)
            before, first = now, False
        except ServerError as error:
            if first:
                raise
            before = None
            yield {"error": str(error)}
        time.sleep(arguments.interval)


def _print(shown: Json, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(shown), flush=True)
    else:
        output().print(page(shown))


def page(shown: Json) -> RenderableType:
    """A summary as tables."""
    if "error" in shown:
        return Text(printable(shown["error"]), style="red")
    parts: list[RenderableType] = [_head(shown), _devices(shown["devices"])]
    if busy := [slot for slot in shown["slots"] if slot["busy"]]:
        parts.append(_slots(busy))
    if len(shown["models"]) > 1:
        parts.append(_models(shown["models"], shown["model"]))
    if shown["daemons"]:
        parts.append(_daemons(shown["daemons"]))
    return Group(*parts)


def _head(shown: Json) -> Table:
    rates, cache, draft = shown["per_second"], shown["cache"], shown["draft"]
    first = shown["time_to_first_token"]
    known = cache["hits"] + cache["misses"]
    rows = {
        "model": printable(shown["model"]),
        "slots": f"{shown['busy']} of {len(shown['slots'])} busy, {shown['queued']:.0f} queued",
        "tokens per second": f"{_number(rates['generated'])} generated, {_number(rates['prompt'])} of prompts",
        "requests per second": _number(rates["requests"]),
        "time to first token": "-" if first is None else f"{1000 * first:,.0f} ms",
        "prefix cache": f"{size_text(int(cache['ram']))} in memory, {size_text(int(cache['disk']))} on the disk, "
        + (f"{100 * cache['hits'] / known:.0f} % hits" if known else "no prompts yet"),
    }
    if draft is not None:
        accepted = "" if draft["acceptance"] is None else f", {100 * draft['acceptance']:.0f} % accepted"
        rows["drafting"] = ("on" if draft["on"] else "off after a failure") + accepted
    return _table(None, list(rows.items()))


def _devices(devices: list[Json]) -> Table:
    rows = []
    for device in devices:
        first, last = device["layers"] or (0, 0)
        rows.append(
            (
                printable(str(device["device"])),
                f"{first}..{last}",
                size_text(device["weights"] or 0),
                _memory(device["free"], device["total"]),
            )
        )
    return _table(("device", "layers", "weights", "memory"), rows)


def _slots(slots: list[Json]) -> Table:
    rows = [
        (
            str(slot["id"]),
            f"{_bar(slot['prompt_done'], slot['prompt'])} {slot['prompt_done']:,} of {slot['prompt']:,}",
            f"{slot['generated']:,}",
        )
        for slot in slots
    ]
    return _table(("slot", "prompt", "generated"), rows)


def _models(models: list[Json], current: str) -> Table:
    rows = []
    for model in models:
        mark = "*" if model["id"] == current else ""
        state = f"{model['state']}{', pinned' if model['pinned'] else ''}"
        rows.append((printable(str(model["id"])) + mark, printable(state)))
    return _table(("model", "state"), rows)


def _daemons(daemons: list[Json]) -> Table:
    rows = [
        (printable(str(d["device"])), "up" if d["up"] else "DOWN", f"{d['restarts'] or 0} restarts") for d in daemons
    ]
    return _table(("daemon", "", ""), rows)


def _table(head: tuple[str, ...] | None, rows: list[tuple[Any, ...]]) -> Table:
    table = Table(*(head or ()), show_header=head is not None, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def _memory(free: int | None, total: int | None) -> str:
    if free is None or not total:
        return "not known"
    return f"{_bar(total - free, total)} {size_text(total - free)} of {size_text(total)}"


def _bar(done: float, total: float) -> str:
    filled = round(_BAR * done / total) if total else 0
    return "#" * filled + "." * (_BAR - filled)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
