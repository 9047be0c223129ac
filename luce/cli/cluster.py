"""`luce cluster`: the machines that have joined a server of this machine, tokens for more, placements, and keys."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import msgspec
from rich.table import Table

from luce.cli.arguments import add_json
from luce.cli.console import output
from luce.cli.options import raise_together
from luce.cli.plain_writer import printable
from luce.cluster import wire
from luce.cluster.admin import ask
from luce.cluster.cluster_files import ClusterFiles, clusters
from luce.cluster.coordinator import TOKEN_SECONDS
from luce.config.values import number
from luce.errors import UsageError

_ACTIONS = {
    "status": "show the members",
    "token": "print a command with which one more machine joins",
    "remove": "end the connection to MEMBER, which has to join again",
    "replan": "load the model anew, on the machines that are there now",
    "rotate": "make a new key of the server; members that are not connected have to join again",
}
#: most minutes for which a token holds: a week
_LONGEST = 7 * 24 * 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ACTION, MEMBER and what the actions take."""
    actions = "; ".join(f"{action}: {text}" for action, text in _ACTIONS.items())
    parser.add_argument("action", metavar="ACTION", choices=_ACTIONS, help=actions)
    parser.add_argument("member", metavar="MEMBER", nargs="?", help="remove: a name that `luce cluster status` shows")
    parser.set_defaults(behind_flags="member")
    parser.add_argument("--cluster", metavar="NAME", help="name of the cluster (default: the only one of this machine)")
    parser.add_argument("--expires", metavar="MINUTES", help="token: how long it holds (default: 15)")
    parser.add_argument("--label", metavar="TEXT", help="token: what `luce cluster status` shows beside the member")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask the server of the cluster; returns 0. Raises UsageError and ServerError."""
    raise_together(list(_misused(arguments)))
    answer = ask(ClusterFiles(arguments.cluster or _only_cluster(), make=False), _command(arguments))
    if isinstance(answer, wire.Done):
        print(printable(answer.text))
    elif arguments.json:
        print(json.dumps(msgspec.to_builtins(answer), indent=2))
    else:
        _show(answer)
    return 0


def _misused(arguments: argparse.Namespace) -> Iterator[UsageError]:
    """Errors about arguments that an action does not take or lacks."""
    action = arguments.action
    if arguments.member is not None and action != "remove":
        yield UsageError(f"luce cluster {action} {arguments.member}: takes no MEMBER", param="member")
    if arguments.member is None and action == "remove":
        yield UsageError("luce cluster remove: name a MEMBER; `luce cluster status` lists them", param="member")
    for name in ("expires", "label"):
        if getattr(arguments, name) is not None and action != "token":
            yield UsageError(f"luce cluster {action}: --{name} is for token", param=name)
    if arguments.json and action != "status":
        yield UsageError(f"luce cluster {action}: --json is for status", param="json")


def _only_cluster() -> str:
    """The cluster of this machine. Raises UsageError unless there is exactly one."""
    found = clusters()
    if len(found) != 1:
        several = f"this machine has several clusters: {', '.join(found)}; name one with --cluster"
        none = "this machine has no cluster; `luce serve MODEL --cluster NAME` makes one"
        raise UsageError(several if found else none, param="cluster")
    return found[0]


def _command(arguments: argparse.Namespace) -> wire.Command:
    match arguments.action:
        case "token":
            try:
                minutes = number(0.1, _LONGEST)(arguments.expires) if arguments.expires else TOKEN_SECONDS / 60
            except ValueError as error:
                raise UsageError(f"--expires {arguments.expires}: {error}", param="expires") from None
            return wire.AskToken(60 * float(minutes), (arguments.label or "")[:60])
        case "remove":
            return wire.AskRemove(arguments.member)
        case "replan":
            return wire.AskReplan()
        case "rotate":
            return wire.AskRotate()
        case _:
            return wire.AskStatus()


def _show(status: wire.Status) -> None:
    columns = (
        "member",
        "label",
        "state",
        "since",
        "address",
        "round trip",
        "devices",
        "layers",
        "file",
        "losses",
        "last words",
    )
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for member in status.members:
        trip = "" if member.round_trip_ms is None else f"{member.round_trip_ms:.1f} ms"
        cells = [member.name, member.label, member.state, f"{member.seconds:.0f} s", member.address, trip]
        cells += [",".join(member.devices), ",".join(member.layers), member.file, str(member.losses), member.reason]
        table.add_row(*(printable(cell) for cell in cells))
    console = output()
    console.print(table)
    where = ", ".join(status.addresses)
    line = f"cluster {status.cluster} at {where}: epoch {status.epoch}, {status.open_tokens} open tokens"
    console.print(line, soft_wrap=True, highlight=False)
