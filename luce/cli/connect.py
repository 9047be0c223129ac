"""`luce connect CLIENT`: what another program needs to use a running server. --write puts it into its files."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys

from luce.cli.clients.programs import PROGRAMS, Setup
from luce.cli.clients.served import ask
from luce.cli.plain_writer import printable
from luce.cli.repl.server_client import ServerClient
from luce.config.environment import environment

_SERVER = "http://127.0.0.1:8080"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """CLIENT, the server, and --write."""
    parser.add_argument("client", metavar="CLIENT", choices=PROGRAMS, help=f"one of {', '.join(PROGRAMS)}")
    parser.add_argument("--server", metavar="URL", default=_SERVER, help=f"the running server (default: {_SERVER})")
    parser.add_argument(
        "--api-key",
        "--key",
        dest="server_key",
        metavar="KEY",
        help="key of --server, which other users can see (default: $OPENAI_API_KEY)",
    )
    parser.add_argument("--model", metavar="NAME", help="a name of the server's model (default: its first)")
    parser.add_argument("--write", action="store_true", help="write the files, with a backup of what was there")


def run(arguments: argparse.Namespace) -> int:
    """Print what the client needs, or write it and print which files changed and how the client is started."""
    key = arguments.server_key or environment("OPENAI_API_KEY") or ""
    with contextlib.closing(ServerClient(arguments.server, key)) as client:
        served = ask(client, key, arguments.model)
    setup = PROGRAMS[arguments.client](served)
    if served.context < setup.least_context:
        text = f"the server's context of {served.context:,} tokens is small for {arguments.client}"
        print(f"luce: {text}, which wants {setup.least_context:,} or more (luce serve --max-ctx)", file=sys.stderr)
    print(printable(_written(setup) if arguments.write else _shown(setup)))
    return 0


def _written(setup: Setup) -> str:
    """Write the files; which they are, and what is next."""
    # All of them are checked before the first is written.
    for file in setup.files:
        file.check()
    lines = []
    for file in setup.files:
        backup = file.save()
        if backup is None:
            lines.append(f"{file.path} has it already")
        elif backup == file.path:
            lines.append(f"{file.path} is written")
        else:
            lines.append(f"{file.path} is changed; {backup} is what it was")
    return "\n".join([*lines, f"start it: {setup.command}"])


def _shown(setup: Setup) -> str:
    """The variables and what the files get."""
    parts = []
    if setup.variables:
        exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in setup.variables.items())
        parts.append(f"# in the environment\n{exports}")
    for file in setup.files:
        alternative = "or in" if setup.variables else "in"
        parts.append(f"# {alternative} {file.path}\n{file.addition().rstrip()}")
    parts.append(f"# --write puts that into the file{'s' if len(setup.files) > 1 else ''}; then\n{setup.command}")
    return "\n\n".join(parts)
