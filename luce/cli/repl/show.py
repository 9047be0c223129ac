"""The topics of /show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table

from luce.cli import options
from luce.cli.console import folded
from luce.cli.plain_writer import printable
from luce.cli.repl.session import Session
from luce.errors import UsageError


def parameter(session: Session, name: str) -> Any:
    """The sampling value in force: set here, or the default."""
    sampling = session.settings.sampling
    return sampling[name] if name in sampling else session.replier.default(name)


def switches(session: Session) -> dict[str, Any]:
    """The other settings."""
    settings = session.settings
    shown = {name: "on" if getattr(settings, name) else "off" for name in ("verbose", "wordwrap", "nohistory")}
    think = "default" if settings.thinking.think is None else settings.thinking.think
    think = f"{think}, {'shown' if settings.thinking.shown else 'folded'}"
    form = settings.response_format
    return {"think": think, "format": "off" if form is None else form["type"], **shown}


def info(session: Session) -> None:
    """The model."""
    _rows(session, session.replier.info())


def parameters(session: Session) -> None:
    """The sampling values and the other settings in force."""
    _rows(session, {name: parameter(session, name) for name in options.NAMES} | switches(session))


def system(session: Session) -> None:
    """The system message."""
    text = session.conversation.system
    session.screen.notes.print("none" if text is None else printable(text))


def template(session: Session) -> None:
    """The source of the chat template."""
    session.screen.notes.print(printable(session.replier.template()))


def reasoning(session: Session) -> None:
    """The reasoning of the last reply, which the screen has folded."""
    messages = session.conversation.messages
    text = messages[-1].reasoning if messages else ""
    session.screen.notes.print(printable(text) if text else "none", style="dim")


def tokens(session: Session) -> None:
    """The number of tokens of each message."""
    replier, messages = session.replier, session.conversation.messages
    rows = {}
    for i, message in enumerate(messages, 1):
        count = replier.count(message.content)
        if count is None:
            raise UsageError("/show tokens: the server does not count tokens; the line below a reply has its counts")
        rows[f"{i}. {message.role}"] = f"{count:,}"
    total = replier.prompt_tokens(session.conversation.for_template()) if messages else 0
    context = "" if replier.context is None else f" of {replier.context:,}"
    _rows(session, {**rows, "with the template": f"{total:,}{context}"})


def devices(session: Session) -> None:
    """The devices and their layers."""
    table = Table("device", "layers", "weights", "state", box=None)
    for shard in session.replier.devices():
        first, last = shard["layers"]
        sizes = (f"{shard[name] / 2**20:,.1f} MiB" for name in ("weights", "state"))
        table.add_row(printable(shard["device"]), f"{first}..{last}", *sizes)
    session.screen.notes.print(table)


def cache(session: Session) -> None:
    """The prefix cache."""
    _rows(session, session.replier.cache())


def _rows(session: Session, rows: dict[str, Any]) -> None:
    table = Table(box=None, show_header=False)
    for name, value in rows.items():
        table.add_row(name, printable(str(value)))
    session.screen.notes.print(folded(table))


TOPICS: dict[str, Callable[[Session], None]] = {
    "info": info,
    "parameters": parameters,
    "system": system,
    "template": template,
    "tokens": tokens,
    "devices": devices,
    "cache": cache,
    "reasoning": reasoning,
}
