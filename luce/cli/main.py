"""Parser and dispatch. Only the module of the verb that runs is imported, so that `luce --help` stays quick."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from luce import __version__
from luce.cli import streams
from luce.cli.streams import OutputError
from luce.errors import LuceError, UsageError

#: each verb and its line in `luce --help`; luce.cli.VERB has its `add_arguments(parser)` and `run(arguments)`
VERBS = {
    "serve": "serve a model over HTTP",
    "chat": "talk with a model",
    "run": "answer one prompt and exit",
    "inspect": "show the contents of a model file and the placement of its layers",
    "bench": "measure how fast a model runs on this machine",
    "cache": "list, check and remove the prompts that are cached on disk",
    "pull": "download a model",
    "shard": "hold layers for a server in another process",
    "doctor": "show drivers, devices and kernel builds of this machine, and problems with them",
}
#: verbs that write nothing that their user reads on standard output
_WITHOUT_OUTPUT = ("serve", "shard")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line: the usage of a verb has sixty."""
        self.exit(UsageError.exit_code, f"luce: {message} ({self.prog} --help tells more)\n")


def parser(verb: str) -> argparse.ArgumentParser:
    """The parser of a command line whose verb is `verb`: of the other verbs it knows only the names."""
    top = _Parser(
        prog="luce", description="A local LLM server that splits one GGUF model over devices that need not match."
    )
    top.add_argument("--version", action="version", version=f"luce {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in VERBS.items():
        sub = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        if name == verb:
            importlib.import_module(f"luce.cli.{name}").add_arguments(sub)
    return top


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """A parsed command line. Raises UsageError for arguments that the verb does not take.

    argparse fills the positionals of a verb before its flags and leaves over those that stand behind flags. A verb
    names the one of its positionals that may stand there with `parser.set_defaults(behind_flags=NAME)`.
    """
    arguments, unknown = parser(_verb(argv)).parse_known_args(argv)
    if unknown and not any(word.startswith("-") for word in unknown):
        name = getattr(arguments, "behind_flags", "")
        value = getattr(arguments, name, "")
        if isinstance(value, list):
            setattr(arguments, name, [*value, *unknown])
            unknown = []
        elif value is None:
            setattr(arguments, name, unknown.pop(0))
    if unknown:
        raise UsageError(f"{' '.join(unknown)}: unknown (luce {arguments.verb} --help tells more)")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status of a LuceError is its class's, after one line on standard error."""
    argv = sys.argv[1:] if argv is None else argv
    with streams.checked(needed=_verb(argv) not in _WITHOUT_OUTPUT) as check_output:
        try:
            check_output()
            status = _run(argv)
            check_output()
        except LuceError as error:
            print(f"luce: {error}", file=sys.stderr)
            return error.exit_code
        except OutputError as error:
            if not error.silent:
                print(f"luce: {error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            return 130
    return status


def _run(argv: Sequence[str]) -> int:
    try:
        arguments = parse(argv)
    except SystemExit as ended:  # --help, --version
        return int(ended.code or 0)
    verb = "plan" if getattr(arguments, "dry_run", False) else arguments.verb
    status: int = importlib.import_module(f"luce.cli.{verb}").run(arguments)
    return status


def _verb(argv: Sequence[str]) -> str:
    """The verb of a command line, empty if there is none."""
    return next((word for word in argv if not word.startswith("-")), "")
