"""`luce cluster`: the machines that have joined a server of this machine, tokens for more, placements, and keys."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from luce.cli.arguments import add_json
from luce.cli.console import output
from luce.cli.options import raise_together
from luce.cli.plain_writer import printable
from luce.cluster import wire
from luce.cluster.admin import ask
from luce.cluster.cluster_files import ClusterFiles, clusters
from luce.cluster.join_token import TOKEN_SECONDS
from luce.config.values import number
from luce.errors import UsageError
from luce.hub.reporting import size_text

_ACTIONS = {
    "status": "show the members and the placement",
    "token": "print a command with which one more machine joins",
    "drain": "let MEMBER leave once other machines have its layers; running replies go on",
    "remove": "end the connection to MEMBER, which has to join again",
    "replan": "load the model anew, on the machines that are there now",
    "rotate": "make a new key of the server; members that are not connected have to join again",
}
#: most minutes for which a token holds: a week
_LONGEST = 7 * 24 * 60.0
#: seconds between two readings of --watch
_INTERVAL = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ACTION, MEMBER and what the actions take."""
    actions = "; ".join(f"{action}: {text}" for action, text in _ACTIONS.items())
    parser.add_argument("action", metavar="ACTION", choices=_ACTIONS, help=actions)
    parser.add_argument(
        "member", metavar="MEMBER", nargs="?", help="drain, remove: a name that `luce cluster status` shows"
    )
    parser.set_defaults(behind_flags="member")
    parser.add_argument("--cluster", metavar="NAME", help="name of the cluster (default: the only one of this machine)")
    parser.add_argument("--expires", metavar="MINUTES", help="token: how long it holds (default: 15)")
    parser.add_argument("--label", metavar="TEXT", help="token: what `luce cluster status` shows beside the member")
    parser.add_argument(
        "--lan",
        action="store_true",
        help="token: without an address, for machines of the same network as a server with --cluster-announce",
    )
    parser.add_argument("--watch", action="store_true", help="status: show it every second, until Ctrl+C")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask the server of the cluster; returns 0. Raises UsageError and ServerError."""
    raise_together(list(_misused(arguments)))
    files = ClusterFiles(arguments.cluster or _only_cluster(), make=False)
    if arguments.watch:
        _watch(files, as_json=arguments.json)
    answer = ask(files, _command(arguments))
    if isinstance(answer, wire.Done):
        print(printable(answer.text))
    elif arguments.json:
        print(json.dumps(msgspec.to_builtins(answer), indent=2))
    else:
        output().print(page(answer))
    return 0


def _watch(files: ClusterFiles, *, as_json: bool) -> NoReturn:
    """Show the cluster every second until Ctrl+C; where no table can be drawn, or as JSON, print each reading."""
    drawn = sys.stdout.isatty() and not as_json
    console = Console(highlight=False, markup=False)
    with Live(console=console, screen=True, auto_refresh=False) if drawn else contextlib.nullcontext() as live:
        while True:
            answer = ask(files, wire.AskStatus())
            assert isinstance(answer, wire.Status)
            if live is not None:
                live.update(page(answer), refresh=True)
            elif as_json:
                print(json.dumps(msgspec.to_builtins(answer)), flush=True)
            else:
                output().print(page(answer))
            time.sleep(_INTERVAL)


def _misused(arguments: argparse.Namespace) -> Iterator[UsageError]:
    """Errors about arguments that an action does not take or lacks."""
    action = arguments.action
    names_one = action in ("drain", "remove")
    if arguments.member is not None and not names_one:
        yield UsageError(f"luce cluster {action} {arguments.member}: takes no MEMBER", param="member")
    if arguments.member is None and names_one:
        yield UsageError(f"luce cluster {action}: name a MEMBER; `luce cluster status` lists them", param="member")
    for name in ("expires", "label", "lan"):
        if getattr(arguments, name) not in (None, False) and action != "token":
            yield UsageError(f"luce cluster {action}: --{name} is for token", param=name)
    for name in ("json", "watch"):
        if getattr(arguments, name) and action != "status":
            yield UsageError(f"luce cluster {action}: --{name} is for status", param=name)


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
            return wire.AskToken(60 * float(minutes), (arguments.label or "")[:60], arguments.lan)
        case "drain":
            return wire.AskDrain(arguments.member)
        case "remove":
            return wire.AskRemove(arguments.member)
        case "replan":
            return wire.AskReplan()
        case "rotate":
            return wire.AskRotate()
        case _:
            return wire.AskStatus()


def page(status: wire.Status) -> RenderableType:
    """A cluster as tables."""
    where = ", ".join(status.addresses)
    line = f"cluster {status.cluster} at {where}: epoch {status.epoch}, {status.open_tokens} open tokens"
    parts: list[RenderableType] = [_members(status), Text(printable(line), no_wrap=True, overflow="ignore")]
    if status.plan is not None:
        parts += ["", _stages(status.plan), *map(Text, [*_speeds(status.plan), *_gains(status.members)])]
    return Group(*parts)


def _members(status: wire.Status) -> Table:
    names = "member,label,state,since,address,round trip,bandwidth,devices,free,layers,version,file,losses,last words"
    rows = []
    for member in status.members:
        trip = "" if member.round_trip_ms is None else f"{member.round_trip_ms:.1f} ms"
        rate = "" if member.bytes_per_second is None else f"{size_text(int(member.bytes_per_second))}/s"
        cells = [member.name, member.label, member.state, f"{member.seconds:.0f} s", member.address, trip, rate]
        cells += [",".join(member.devices), ", ".join(map(_memory, member.memory)), ",".join(member.layers)]
        rows.append([*cells, member.luce, member.file, str(member.losses), member.reason])
    return _table(names.split(","), rows)


def _stages(plan: wire.PlanStatus) -> Table:
    known = [stage.predicted_ms for stage in plan.stages]
    times = ["" if found is None else f"{found:.2f} ms" for found in known]
    rows = [(stage.device, stage.layers, text) for stage, text in zip(plan.stages, times, strict=True)]
    return _table(["device", "layers", "predicted for a token"], rows)


def _speeds(plan: wire.PlanStatus) -> Iterator[str]:
    for name, decode, prompts in (
        ("predicted", plan.predicted_decode_tok_s, plan.predicted_prompt_tok_s),
        ("measured", plan.measured_decode_tok_s, plan.measured_prompt_tok_s),
    ):
        yield f"{name}: decode {_rate(decode)}, prompts {_rate(prompts)}"
    if plan.direct_links_ms:
        yield f"connections between members would save {plan.direct_links_ms:.2f} ms of a token"


def _gains(members: Sequence[wire.MemberStatus]) -> Iterator[str]:
    """What a new placement would bring, or what has to be measured to know that."""
    for member in members:
        if member.gain_decode is not None and member.gain_prompt is not None:
            gains = f"decode {member.gain_decode:+.0%}, prompts {member.gain_prompt:+.0%}"
            yield f"{printable(member.name)} has no layers; `luce cluster replan` would bring: {gains}"
        elif member.unmeasured:
            yield f"{printable(member.name)} has no layers and is not measured yet; `luce cluster replan` measures it"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*head, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _memory(memory: wire.DeviceMemory) -> str:
    free, total = ("?" if size is None else size_text(size) for size in (memory.free, memory.total))
    return f"{free} of {total}"


def _rate(rate: float | None) -> str:
    return "not known" if rate is None else f"{rate:,.1f} tok/s"
