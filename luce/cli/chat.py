"""`luce chat MODEL`: a conversation at the terminal, or with the lines of a pipe.

Replies go to standard output. Notes about them go there too at a terminal, else to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass, field

from rich.console import Console

from luce.assembly import open_model
from luce.cli import progress
from luce.cli.arguments import LOADED, MODEL_HELP, add_reply, add_settings, settings
from luce.cli.options import parse_flags
from luce.cli.plain_writer import printable
from luce.cli.pull import fetch
from luce.cli.repl import conversation as files
from luce.cli.repl.commands import completer, resume, set_think
from luce.cli.repl.dispatch import Chat
from luce.cli.repl.input import HistoryFile, PipeInput, TerminalInput, open_history
from luce.cli.repl.model_replier import ModelReplier
from luce.cli.repl.replier import Replier
from luce.cli.repl.server_client import ServerClient
from luce.cli.repl.server_replier import ServerReplier
from luce.cli.repl.session import Screen, Session, Settings
from luce.config.directories import user_state_directory
from luce.config.environment import environment
from luce.config.settings import FIELDS, Config, flag
from luce.errors import UsageError

#: groups of the settings that this verb takes
SETTINGS = (*LOADED, "sampling", "reasoning")


@dataclass(frozen=True)
class Options:
    """How a conversation begins and looks."""

    system: str | None = None
    #: no colours, no Markdown
    plain: bool = False
    #: continue the last conversation
    resume: bool = False
    #: `!` runs commands
    allow_shell: bool = False
    #: as `/set think` takes it; empty: as the model does by itself
    think: str = ""
    settings: Settings = field(default_factory=Settings)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, how the conversation begins and looks, and the flags of the settings."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help=f"{MODEL_HELP}; with --server, a name there")
    parser.add_argument("--server", metavar="URL", help="talk with a server that speaks OpenAI's API; load nothing")
    parser.add_argument(
        "--api-key",
        dest="server_key",
        metavar="KEY",
        help="key of --server, which other users can see (default: $OPENAI_API_KEY)",
    )
    parser.set_defaults(behind_flags="model")
    parser.add_argument("-s", "--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "-c", "--continue", dest="resume", action="store_true", help="continue the last conversation of a terminal"
    )
    parser.add_argument(
        "--think",
        metavar="VALUE",
        default="",
        help="as /set think: on, off, low, ..., a budget, show or hide",
    )
    parser.add_argument("--allow-shell", action="store_true", help="!COMMAND runs a command")
    parser.add_argument("--plain", action="store_true", help="no colours, no Markdown (also with NO_COLOR)")
    add_reply(parser)
    add_settings(parser, SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Run the conversation until the user leaves. From a pipe, the exit status is that of the last error."""
    config = settings(arguments)
    if arguments.model is None and arguments.server is None:
        raise UsageError("MODEL: missing; give a model, or --server", param="model")
    given = Options(arguments.system, arguments.plain, arguments.resume, arguments.allow_shell, arguments.think)
    given.settings.sampling.update(parse_flags(arguments))
    if given.resume:
        _check_resume()
    if arguments.server is not None:
        return _talk_to_server(arguments, config, given)
    if arguments.server_key is not None:
        raise UsageError("--api-key: requires --server", param="api_key")
    path = fetch(arguments.model, config)
    with progress.shown(f"loading {path.name}") as wait:
        model = open_model(path, config, wait.share)
    with model:
        return talk(ModelReplier(model), given)


def _talk_to_server(arguments: argparse.Namespace, config: Config, given: Options) -> int:
    """The conversation with a server. Sampling values that nobody set are the server's."""
    flags, own = vars(arguments), (*LOADED, "reasoning")
    useless = [flag(name) for name, setting in FIELDS.items() if name in flags and setting.metadata["group"] in own]
    if useless:
        raise UsageError(f"{useless[0]}: not with --server, which has its own settings")
    names = [name for name, setting in FIELDS.items() if setting.metadata["group"] == "sampling"]
    set_here = {n: getattr(config, n) for n in names if n in flags or getattr(config, n) != FIELDS[n].default}
    given.settings.sampling.update(set_here)
    client = ServerClient(arguments.server, arguments.server_key or environment("OPENAI_API_KEY") or "")
    with contextlib.closing(client):
        return talk(ServerReplier(client, arguments.model), given)


def _check_resume() -> None:
    """Raise UsageError if there is no conversation to continue, before a model is loaded for it."""
    if not files.last().exists():
        raise UsageError("--continue: there is no conversation yet")
    files.read(files.last())


def talk(replier: Replier, given: Options) -> int:
    """The conversation with what answers it."""
    plain = given.plain or environment("NO_COLOR") is not None
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        notes = Console(stderr=True, highlight=False, markup=False)
        session = Session(
            replier,
            PipeInput(sys.stdin),
            Screen(notes),
            given.settings,
            allow_shell=given.allow_shell,
            keep=given.resume,
        )
        _begin(session, given)
        return Chat(session).talk()
    history = open_history(user_state_directory() / "history")
    terminal = TerminalInput(history=history, completer=completer(), plain=plain)
    console = Console(highlight=False, markup=False, no_color=plain)
    screen = Screen(console, None if plain else console, interactive=True)
    session = Session(replier, terminal, screen, given.settings, allow_shell=given.allow_shell, keep=True)
    session.history = history if isinstance(history, HistoryFile) else None
    context = "" if replier.context is None else f"{replier.context:,} tokens of context · "
    console.print(f"{printable(replier.name)} · {context}/? for help, /bye to leave")
    _begin(session, given)
    return Chat(session).talk()


def _begin(session: Session, given: Options) -> None:
    if given.resume:
        resume(session, files.last())
    if given.system is not None:
        session.conversation.system = given.system
    if given.think:
        set_think(session, given.think)
