"""Parser and dispatch. A verb's module is imported when the verb runs, so that `luce --help` stays quick."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from luce import __version__
from luce.config.flags import add_flags
from luce.config.resolve import resolve
from luce.config.settings import FIELDS, Config
from luce.errors import LuceError, UsageError


@dataclass(frozen=True)
class Verb:
    """A command: its one-line help, and the setting groups whose flags it takes."""

    help: str
    groups: tuple[str, ...] = ()
    model: bool = True


RUNTIME = (
    "placement",
    "copies",
    "remote",
    "engine",
    "pool",
    "residency",
    "draft",
    "cache",
    "disk cache",
    "limits",
    "text",
)
VERBS = {
    "serve": Verb("serve a model over HTTP", (*RUNTIME, "sampling", "server", "log")),
    "chat": Verb("talk with a model", (*RUNTIME, "sampling")),
    "run": Verb("answer one prompt and exit", (*RUNTIME, "sampling")),
    "inspect": Verb(
        "show what a model file holds and where its layers would go",
        ("placement", "remote", "engine", "pool", "draft"),
    ),
    "bench": Verb(
        "measure how fast a model runs on this machine",
        ("placement", "copies", "remote", "engine", "pool", "residency"),
    ),
    "cache": Verb("show and clean the directory that keeps prompts across restarts", ("disk cache",), model=False),
    "pull": Verb("download a model"),
    "shard": Verb("hold layers for a server in another process", model=False),
    "doctor": Verb("show drivers, devices and kernel builds of this machine", model=False),
}
_CACHE_ACTIONS = {
    "ls": "list the snapshots",
    "show": "print the manifest of snapshots",
    "verify": "check every byte of snapshots, of all if none is named",
    "rm": "remove snapshots",
    "gc": "remove what nothing needs, and keep to --kv-cache-budget",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line: the usage of a verb has sixty."""
        self.exit(UsageError.exit_code, f"luce: {message} ({self.prog} --help tells more)\n")


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = _Parser(
        prog="luce", description="A local LLM server that splits one GGUF model over devices that need not match."
    )
    top.add_argument("--version", action="version", version=f"luce {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, verb in VERBS.items():
        sub = verbs.add_parser(
            name, help=verb.help, description=verb.help[0].upper() + verb.help[1:] + ".", allow_abbrev=False
        )
        if verb.model:
            sub.add_argument("model", metavar="MODEL", help="path of a GGUF file, or an alias (smollm2)")
        if name == "run":
            sub.add_argument("prompt", metavar="PROMPT", nargs="?", help="the prompt; standard input is added to it")
            sub.add_argument("-s", "--system", metavar="TEXT", help="system message")
            sub.add_argument(
                "-o", "--option", metavar="K=V", action="append", default=[], help="sampling value (repeatable)"
            )
            sub.add_argument("--max-tokens", metavar="N", help="longest reply (default: room in the context)")
        if name == "chat":
            sub.add_argument("-s", "--system", metavar="TEXT", help="system message")
            sub.add_argument("--plain", action="store_true", help="no colours, no Markdown (also with NO_COLOR)")
        if name == "shard":
            sub.add_argument("model", metavar="MODEL", nargs="?", help="this machine's copy of the server's file")
            sub.add_argument("--listen", metavar="HOST:PORT", help="address for servers of other machines")
            sub.add_argument("--key-file", metavar="FILE", help="key and certificate that servers must have too")
            sub.add_argument(
                "--draft", metavar="PATH", help="this machine's copy of a draft, if it is to hold that instead"
            )
            sub.add_argument("--fds", metavar="N,N", help=argparse.SUPPRESS)
        if name == "inspect":
            sub.add_argument("--layers", action="store_true", help="a table of all layers (--json has it anyway)")
        if name == "bench":
            _add_tests(sub)
        if name == "cache":
            actions = "; ".join(f"{action}: {text}" for action, text in _CACHE_ACTIONS.items())
            sub.add_argument("action", metavar="ACTION", choices=_CACHE_ACTIONS, help=actions)
            sub.add_argument("ids", metavar="ID", nargs="*", default=[], help="the beginning of a snapshot's id")
            sub.add_argument("--all", action="store_true", help="rm: every snapshot")
        if name in ("run", "inspect", "bench", "cache", "doctor"):
            sub.add_argument("--json", action="store_true", help="machine-readable output")
        if "limits" in verb.groups:
            sub.add_argument("--dry-run", action="store_true", help="print where the layers would go, and load nothing")
        if verb.groups:
            add_flags(sub, verb.groups)
    return top


def _add_tests(sub: argparse.ArgumentParser) -> None:
    """What `luce bench` measures, as lists of sizes."""
    lists = {
        ("-p", "--prompt"): ("512", "prompt tokens to read"),
        ("-n", "--generate"): ("128", "tokens to generate"),
        ("-d", "--depth"): ("0", "tokens of context before them"),
        ("--rows",): ("", "rows of one sequence to verify in a step"),
        ("--sequences",): ("", "sequences to decode side by side, at the first depth"),
    }
    for flags, (default, text) in lists.items():
        shown = f"{text} (default: {default})" if default else text
        sub.add_argument(*flags, metavar="N[,N...]", default=default, help=shown)
    sub.add_argument("-r", "--repeat", metavar="N", type=int, default=5, help="runs of each test (default: 5)")


def settings(arguments: argparse.Namespace) -> Config:
    """The Config of a parsed command line."""
    names = {*FIELDS, "config"}
    return resolve({k: v for k, v in vars(arguments).items() if k in names})


def _behind_flags(arguments: argparse.Namespace, unknown: list[str]) -> list[str]:
    """Take what argparse leaves over where flags come before what may be left out; returns what is still unknown."""
    if any(word.startswith("-") for word in unknown):
        return unknown
    if arguments.verb == "cache":
        arguments.ids = [*arguments.ids, *unknown]
        return []
    if arguments.verb == "run" and arguments.prompt is None and unknown:
        arguments.prompt, *unknown = unknown
    return unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status of a LuceError is its class's, after one line on standard error."""
    arguments, unknown = parser().parse_known_args(argv)
    unknown = _behind_flags(arguments, unknown)
    if unknown:
        print(f"luce: {' '.join(unknown)}: unknown (luce {arguments.verb} --help tells more)", file=sys.stderr)
        return UsageError.exit_code
    verb = "plan" if getattr(arguments, "dry_run", False) else arguments.verb
    try:
        status: int = importlib.import_module(f"luce.cli.{verb}").run(arguments)
        sys.stdout.flush()
    except LuceError as error:
        print(f"luce: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left. Python would complain once more when it flushes at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status
