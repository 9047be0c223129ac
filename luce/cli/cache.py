"""`luce cache`: lists, checks and removes snapshots on the disk. A server may use the same directory meanwhile."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from luce.cli.arguments import add_json, add_settings, settings
from luce.cli.console import output
from luce.cli.options import raise_together
from luce.cli.plain_writer import printable
from luce.config.cache_directory import cache_directory
from luce.errors import UsageError
from luce.kvcache.disk.files import open_directory
from luce.kvcache.disk.fingerprint import Fingerprint, read_about
from luce.kvcache.disk.index import Snapshot
from luce.kvcache.disk.manifest import LAYOUT
from luce.kvcache.disk.part import DamagedError
from luce.kvcache.disk.store import Store

#: groups of the settings that this verb takes
SETTINGS = ("prefix cache on disk",)
#: characters of a model's name in a table
_LONGEST_NAME = 60
_ACTIONS = {
    "ls": "list the snapshots",
    "show": "print the manifests of the named snapshots",
    "verify": "check every byte of the named snapshots, or of all",
    "rm": "remove the named snapshots",
    "gc": "remove unused files, and snapshots beyond --kv-cache-budget",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ACTION, IDs and the flags of the settings."""
    actions = "; ".join(f"{action}: {text}" for action, text in _ACTIONS.items())
    parser.add_argument("action", metavar="ACTION", choices=_ACTIONS, help=actions)
    parser.add_argument("ids", metavar="ID", nargs="*", default=[], help="the first characters of a snapshot's id")
    parser.add_argument("--all", action="store_true", help="rm: every snapshot")
    parser.set_defaults(behind_flags="ids")
    add_json(parser)
    add_settings(parser, SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Run the action; returns the exit status: 1 if `verify` finds damage, otherwise 0."""
    config = settings(arguments)
    raise_together(list(_misused(arguments)))
    directory = cache_directory(config)
    if directory is None:
        raise UsageError("--kv-cache-dir off: there is no cache directory", param="kv_cache_dir")
    try:
        if not (directory / LAYOUT).is_dir():
            if arguments.ids:
                raise UsageError(f"{arguments.ids[0]}: no snapshots in {directory}", param="ids")
            if config.kv_cache_dir != "auto" and not directory.is_dir():
                raise UsageError(f"--kv-cache-dir {directory}: no such directory", param="kv_cache_dir")
            if arguments.json:
                print("[]")
            print(f"luce: no snapshots in {directory}", file=sys.stderr)
            return 0
        store = Store(directory, "", config.kv_cache_budget << 20)
        actions: dict[str, Callable[[], int]] = {
            "ls": lambda: _list(store, as_json=arguments.json),
            "show": lambda: _show(_named(store, _ids(store, arguments.ids))),
            "verify": lambda: _verify(store, _named(store, arguments.ids) if arguments.ids else store.snapshots),
            "rm": lambda: _remove(store, arguments.ids, everything=arguments.all),
            "gc": lambda: _collect(store),
        }
        return actions[arguments.action]()
    except OSError as error:
        raise UsageError(f"--kv-cache-dir {directory}: {error}", param="kv_cache_dir") from None


def _misused(arguments: argparse.Namespace) -> Iterator[UsageError]:
    """Errors about arguments that an action does not take or lacks."""
    action, ids = arguments.action, arguments.ids
    if ids and action in ("ls", "gc"):
        yield UsageError(f"luce cache {action} {ids[0]}: takes no ID", param="ids")
    if arguments.all and action != "rm":
        yield UsageError(f"luce cache {action}: --all is for rm", param="all")
    if arguments.json and action not in ("ls", "show"):
        yield UsageError(f"luce cache {action}: --json is for ls and show", param="json")
    if action == "rm" and arguments.all and ids:
        yield UsageError(f"luce cache rm --all {ids[0]}: give either IDs or --all", param="ids")
    if action == "rm" and not ids and not arguments.all:
        yield UsageError(f"luce cache {action}: name a snapshot; `luce cache ls` lists them", param="ids")


def _ids(store: Store, ids: list[str]) -> list[str]:
    """The ids of `luce cache show`. Without any, raises UsageError that lists those that there are."""
    if not ids:
        known = sorted(store.snapshots, key=lambda snapshot: -snapshot.last_used)
        listed = ", ".join(snapshot.manifest.id[:8] for snapshot in known) or "there is none"
        raise UsageError(f"luce cache show: name a snapshot: {listed}", param="ids")
    return ids


def _named(store: Store, ids: list[str]) -> list[Snapshot]:
    """The snapshots whose ids start with `ids`. Raises UsageError unless each names exactly one."""
    found = []
    for id in ids:
        matching = [snapshot for snapshot in store.snapshots if snapshot.manifest.id.startswith(id)]
        if not matching:
            raise UsageError(f"no snapshot id starts with {id!r}", param="ids")
        if len(matching) > 1:
            raise UsageError(f"{len(matching)} snapshot ids start with {id!r}", param="ids")
        found += matching
    return found


def _list(store: Store, *, as_json: bool) -> int:
    snapshots = sorted(store.snapshots, key=lambda snapshot: -snapshot.last_used)
    if as_json:
        names = _names(store)
        print(json.dumps([{"name": names[s.manifest.model], **_facts(s)} for s in snapshots], indent=2))
        return 0
    table = Table("id", "tokens", "bytes", "age", "last use", "parent", "model", box=None, padding=(0, 2, 0, 0))
    for column in table.columns[1:3]:
        column.justify = "right"
    now = time.time()
    names = _names(store)
    for snapshot in snapshots:
        manifest = snapshot.manifest
        table.add_row(
            manifest.id[:8] + ("" if manifest.resumable else " (pages)"),
            f"{manifest.length:,}",
            f"{manifest.nbytes:,}",
            _duration(now - manifest.created),
            _duration(now - snapshot.last_used),
            "" if manifest.parent is None else manifest.parent[:8],
            # Files and settings of one name differ in their fingerprint.
            Text(f"{names[manifest.model]} ({manifest.model[:8]})" if names[manifest.model] else manifest.model[:8]),
        )
    console = output()
    console.print(table)
    console.print(f"{len(snapshots)} snapshots, {store.nbytes:,} bytes in {store.root}", soft_wrap=True)
    return 0


def _about(snapshot: Snapshot) -> Fingerprint | None:
    """What the model's directory says about the model of a snapshot, None if that cannot be read."""
    try:
        with open_directory(snapshot.root, LAYOUT, snapshot.manifest.model) as directory:
            return read_about(directory)
    except OSError:
        return None


def _names(store: Store) -> dict[str, str]:
    """By fingerprint, the names of the models that have snapshots; empty where an earlier version wrote them."""
    names = {}
    for model, snapshot in {snapshot.manifest.model: snapshot for snapshot in store.snapshots}.items():
        about = _about(snapshot)
        # One line of the table, whatever the file says.
        names[model] = "" if about is None else " ".join(printable(about.name).split())[:_LONGEST_NAME]
    return names


def _facts(snapshot: Snapshot) -> dict[str, Any]:
    facts = msgspec.to_builtins(snapshot.manifest)
    # Pages of digits if the text is long.
    del facts["page_keys"]
    return {**facts, "bytes": snapshot.manifest.nbytes, "last_used": snapshot.last_used}


def _show(snapshots: list[Snapshot]) -> int:
    for snapshot in snapshots:
        about = _about(snapshot)
        settings = {} if about is None else {"name": about.name, "settings": about.settings}
        print(json.dumps({"path": str(snapshot.path), **_facts(snapshot), **settings}, indent=2))
    return 0


def _verify(store: Store, snapshots: list[Snapshot]) -> int:
    damaged = 0
    for snapshot in snapshots:
        try:
            store.verify(snapshot)
            store.chain(snapshot)
            print(f"{snapshot.manifest.id}: ok")
        except (DamagedError, OSError) as error:
            if store.changed(snapshot):
                print(f"{snapshot.manifest.id}: removed or replaced meanwhile")
                continue
            damaged += 1
            print(f"{snapshot.manifest.id}: damaged: {error}")
    return 1 if damaged or store.quarantines else 0


def _remove(store: Store, ids: list[str], *, everything: bool) -> int:
    if everything:
        print(f"{store.clear()} snapshots removed")
        return 0
    for snapshot in _named(store, ids):
        store.evict(snapshot)
        rest = ", except for the pages that other snapshots continue" if snapshot.children else ""
        print(f"{snapshot.manifest.id}: removed{rest}")
    return 0


def _collect(store: Store) -> int:
    before = store.disk_bytes()
    store.collect_garbage()
    print(f"{before - store.disk_bytes():,} bytes freed, {store.nbytes:,} bytes in {len(store.snapshots)} snapshots")
    return 0


def _duration(seconds: float) -> str:
    """A duration in its largest whole unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
