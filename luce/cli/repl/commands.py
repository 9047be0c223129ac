"""The commands of a chat. A command is a function of the session and of the text behind its name, and a line in
COMMANDS. It raises UsageError, which names the command, for what it cannot do."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from luce.cli import options
from luce.cli.console import folded
from luce.cli.plain_writer import printable
from luce.cli.repl import conversation as files
from luce.cli.repl import show
from luce.cli.repl.attachments import (
    ASK_BYTES,
    MOST_BYTES,
    file_size,
    matches,
    path_of,
    read_file,
    run_command,
    schema_format,
)
from luce.cli.repl.input import CommandCompleter
from luce.cli.repl.replier import THINK, Request
from luce.cli.repl.session import Session
from luce.cli.user_files import write
from luce.errors import UsageError

_SWITCHES = ("verbose", "wordwrap", "nohistory")


def show_help(session: Session, rest: str) -> None:
    """List the commands and keys."""
    table = Table(box=None, show_header=False)
    seen: dict[str, list[str]] = {}
    for name, command in {**COMMANDS, **LEAVE}.items():
        seen.setdefault(f"{command.arguments}\0{command.help}", []).append(name)
    for key, names in seen.items():
        arguments, _, text = key.partition("\0")
        table.add_row(f"{' '.join(names)} {arguments}".rstrip(), text)
    for keys, text in _KEYS.items():
        table.add_row(keys, text)
    # The topics of /show are one word, which is wider than half a terminal.
    session.screen.notes.print(folded(table))


def clear(session: Session, rest: str) -> None:
    """Forget the messages."""
    session.conversation.messages.clear()
    session.attachments.clear()
    session.note("the conversation is empty")


def regen(session: Session, rest: str) -> None:
    """Generate another reply to the last message."""
    seed = options.parse("seed", rest, "/regen") if rest else None
    if not session.conversation.messages:
        raise UsageError("/regen: there is no message yet")
    before = list(session.conversation.messages)
    session.conversation.drop_reply()
    session.answer(before, seed)


def undo(session: Session, rest: str) -> None:
    """Drop the last turn."""
    text = session.conversation.drop_turn()
    if text is None:
        raise UsageError("/undo: there is no message yet")
    session.save_last()
    session.note(f"dropped: {_short(text)}")


def retry(session: Session, rest: str) -> None:
    """Edit the last message and send it again."""
    before = list(session.conversation.messages)
    text = session.conversation.drop_turn()
    if text is None:
        raise UsageError("/retry: there is no message yet")
    try:
        text = rest or session.source.read(text)
    except EOFError:
        session.conversation.messages = before
        raise
    session.conversation.add("user", text)
    session.answer(before)


def edit(session: Session, rest: str) -> None:
    """Write a message in the editor."""
    session.send(session.source.read(rest, editor=True))


# Settings.


def change(session: Session, rest: str) -> None:
    """Show or change a setting."""
    name, _, value = rest.partition(" ")
    name, value = name.replace("-", "_"), value.strip()
    sampling = session.settings.sampling
    if not name:
        show.parameters(session)
    elif name in _SETTERS:
        _SETTERS[name](session, value)
    elif name in _SWITCHES:
        _switch(session, name, value)
    elif name == "parameter" and value:  # as Ollama spells it
        change(session, value)
    elif not value:
        if name not in options.NAMES:
            options.parse(name, "", "/set")
        session.note(f"{name} {show.parameter(session, name)}")
    elif value == "default" and name in options.NAMES:
        sampling.pop(name, None)
        session.note(f"{name} {show.parameter(session, name)}")
    else:
        sampling[name] = options.parse(name, value, f"/set {name}")
        session.note(f"{name} {sampling[name]}")


def _set_system(session: Session, value: str) -> None:
    session.conversation.system = value or None
    session.note("system message set" if value else "no system message")


def set_think(session: Session, value: str) -> None:
    """Switch the reasoning on or off, or show and fold it. Raises UsageError."""
    settings = session.settings
    if value:
        thinking = settings.thinking.changed(value, "/set think")
        session.replier.check(Request(think=thinking.think), "/set")
        settings.thinking = thinking
    session.note(f"think {show.switches(session)['think']}")


def _set_format(session: Session, value: str) -> None:
    if value:
        form = response_format(value, "/set format")
        session.replier.check(Request(response_format=form), "/set format")
        session.settings.response_format = form
    session.note(f"format {show.switches(session)['format']}")


def response_format(value: str, origin: str) -> Mapping[str, Any] | None:
    """OpenAI's `response_format` for `json` or the path of a JSON schema; None for `off`.

    Raises UsageError that begins with `origin`.
    """
    if value == "off":
        return None
    if value == "json":
        return {"type": "json_object"}
    return schema_format(path_of(value, origin), origin)


def _switch(session: Session, name: str, value: str) -> None:
    if value not in ("", "on", "off"):
        raise UsageError(f"/set {name}: expected on or off, got {value!r}")
    settings = session.settings
    setattr(settings, name, value != "off")
    if session.history is not None:
        session.history.enabled = not settings.nohistory
    session.note(f"{name} {'off' if value == 'off' else 'on'}")


def show_topic(session: Session, rest: str) -> None:
    """Show one topic."""
    if rest not in show.TOPICS:
        raise UsageError(f"/show: expected {' or '.join(show.TOPICS)}, got {rest!r}")
    show.TOPICS[rest](session)


# Files.


def save(session: Session, rest: str) -> None:
    """Save the conversation under a name."""
    write(files.saved(rest, "/save"), session.conversation.json())
    session.note(f"saved; /load {rest} continues it")


def load(session: Session, rest: str) -> None:
    """Continue a saved conversation; without a name list them."""
    if rest:
        resume(session, files.saved(rest, "/load"))
        return
    table = Table(box=None, show_header=False)
    for name, changed, saved in files.saved_chats():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(changed))
        if isinstance(saved, str):
            table.add_row(printable(name), when, "", printable(saved))
        else:
            first = saved.messages[0].content if saved.messages else ""
            table.add_row(printable(name), when, _count(saved), _short(first))
    if table.row_count:
        session.screen.notes.print(table)
    else:
        session.note("no conversation is saved; /save NAME saves this one")


def resume(session: Session, path: Path) -> None:
    """Continue the conversation of a file. Raises UsageError."""
    session.conversation = files.read(path)
    session.attachments.clear()
    messages = session.conversation.messages
    last = next((message.content for message in reversed(messages) if message.role == "user"), "")
    session.note(_count(session.conversation) + (f"; your last one: {_short(last)}" if last else ""))


def export(session: Session, rest: str) -> None:
    """Write the conversation to a file of the user's choice."""
    path = path_of(rest, "/export")
    if path.suffix not in (".md", ".json"):
        raise UsageError(f"/export: expected a file name that ends in .md or .json, got {rest!r}")
    if path.exists() and not session.source.ask(f"{path} exists; replace it?"):
        return
    markdown = path.suffix == ".md"
    conversation = session.conversation
    write(path, conversation.markdown().encode() if markdown else conversation.json())
    session.note(f"wrote {path}")


def read(session: Session, rest: str) -> None:
    """Put a text file in front of the next message."""
    path = path_of(rest, "/read")
    size = file_size(path, "/read")
    if size > ASK_BYTES and not session.source.ask(f"{path} has {size:,} bytes; read it?"):
        return
    tokens = session.attach(read_file(path, "/read"), f"/read {path}")
    session.note(f"{path}, {_sizes(size, tokens)}: added in front of your next message")


def read_matches(session: Session, rest: str) -> None:
    """Put the text files that match a pattern in front of the next message, each behind its name."""
    paths = matches(rest)
    sizes = {path: file_size(path, "/glob") for path in paths}
    total = sum(sizes.values())
    for path, size in sizes.items():
        session.note(f"{path}, {size:,} bytes")
    if total > MOST_BYTES:
        raise UsageError(f"/glob {rest}: {total:,} bytes exceed the limit of {MOST_BYTES:,}")
    if total > ASK_BYTES and not session.source.ask(f"{len(paths)} files have {total:,} bytes; read them?"):
        return
    before = list(session.attachments)
    counts: list[int | None] = []
    try:
        for path in paths:
            item = read_file(path, "/glob")
            item = dataclasses.replace(item, text=f"{path}:\n\n{item.text}")
            counts.append(session.attach(item, f"/glob {rest}: {path}"))
    except UsageError:
        session.attachments[:] = before
        raise
    known = [count for count in counts if count is not None]
    tokens = sum(known) if len(known) == len(counts) else None
    files_read = "1 file" if len(paths) == 1 else f"{len(paths)} files"
    session.note(f"{files_read}, {_sizes(total, tokens)}: added in front of your next message")


def unread(session: Session, rest: str) -> None:
    """Drop the last text in front of the next message."""
    if not session.attachments:
        raise UsageError("/unread: there is no text in front of your next message")
    dropped = session.attachments.pop()
    left = len(session.attachments)
    session.note(f"dropped: {_short(dropped.name)}" + (f"; {left} left" if left else ""))


def shell(session: Session, command: str) -> None:
    """Run a command, show its output, and put that in front of the next message."""
    if not session.allow_shell:
        raise UsageError(f"!{_short(command)}: commands run only with luce chat --allow-shell")
    if not command:
        raise UsageError("!: expected a command")
    item, status = run_command(command, lambda line: session.screen.notes.print(printable(line)))
    if status is None:
        session.note("(stopped)")
        return
    if status:
        session.note(f"exit status {status}")
    tokens = session.attach(item, f"!{_short(command)}")
    session.note(f"{_sizes(len(item.text.encode()), tokens)}: added in front of your next message; /unread drops it")


def _sizes(size: int, tokens: int | None) -> str:
    return f"{size:,} bytes" if tokens is None else f"{size:,} bytes, {tokens:,} tokens"


def _count(conversation: files.Conversation) -> str:
    count = len(conversation.messages)
    return f"{count} messages" if count != 1 else "1 message"


def _short(text: str) -> str:
    line = printable(text).replace("\n", " ")
    return line if len(line) <= 60 else line[:59] + "…"


@dataclass(frozen=True)
class Command:
    """A command of the chat."""

    run: Callable[[Session, str], None]
    #: placeholders of its arguments in the help
    arguments: str
    help: str


_SETTERS: dict[str, Callable[[Session, str], None]] = {
    "system": _set_system,
    "think": set_think,
    "format": _set_format,
}
COMMANDS = {
    "/help": Command(show_help, "", "this list"),
    "/?": Command(show_help, "", "this list"),
    "/clear": Command(clear, "", "forget the conversation"),
    "/reset": Command(clear, "", "forget the conversation"),
    "/regen": Command(regen, "[SEED]", "another reply to the last message"),
    "/undo": Command(undo, "", "drop the last message and its reply"),
    "/retry": Command(retry, "[TEXT]", "edit the last message and send it again"),
    "/edit": Command(edit, "[TEXT]", "write a message in $VISUAL or $EDITOR"),
    "/read": Command(read, "PATH", "put a text file in front of the next message"),
    "/glob": Command(read_matches, "PATTERN", "put all matching text files in front of it"),
    "/unread": Command(unread, "", "drop the last of the texts in front of it"),
    "/set": Command(
        change,
        "[NAME [VALUE]]",
        "settings: sampling values, system, think, format, verbose, wordwrap, nohistory; VALUE may be default",
    ),
    "/show": Command(show_topic, "|".join(show.TOPICS), "show the model, the settings, what is used"),
    "/save": Command(save, "NAME", "save the conversation"),
    "/load": Command(load, "[NAME]", "continue a saved conversation; without a name list them"),
    "/export": Command(export, "FILE.md|FILE.json", "write the conversation to a file"),
}
LEAVE = dict.fromkeys(
    ("/bye", "/exit", "/quit"), Command(lambda session, rest: None, "", "leave; so do exit, quit, Ctrl+D")
)
_KEYS = {
    '"""': "begins and ends a message of several lines; a trailing \\ continues a line",
    "!COMMAND": "run a command, with luce chat --allow-shell; its output goes in front of your next message",
    "Alt+Enter Ctrl+J": "new line in a message",
    "Ctrl+G": "write in the editor",
    "Ctrl+R, Up": "earlier messages",
    "Ctrl+L": "clear the screen",
    "Ctrl+C": "stop a reply; at the prompt clear the line, twice leave",
}


def completer() -> CommandCompleter:
    """Completes the commands and their arguments."""
    words: dict[str, Any] = dict.fromkeys((*COMMANDS, *LEAVE), ())
    words["/set"] = (*options.NAMES, *_SETTERS, *_SWITCHES)
    words["/set think"] = (*THINK, "default", "show", "hide")
    words["/show"] = show.TOPICS
    words["/load"] = words["/save"] = files.saved_names
    words["/read"] = words["/export"] = words["/glob"] = words["/set format"] = None
    return CommandCompleter(words)
