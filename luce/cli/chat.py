"""`luce chat MODEL`: a conversation at the terminal, or with the lines of a pipe.

Replies go to standard output. Notes about them go there too at a terminal, else to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from luce.api import Model
from luce.assembly import open_model
from luce.cli import conversation as files
from luce.cli import options, progress
from luce.cli.arguments import LOADED, add_model, add_settings, settings
from luce.cli.conversation import Conversation, Message
from luce.cli.markdown import MarkdownWriter, PlainWriter, ReplyWriter, printable
from luce.cli.pull import fetch
from luce.cli.repl import CommandCompleter, HistoryFile, Input, PipeInput, TerminalInput, no_echo, open_history
from luce.cli.turn import Interrupt, Turn
from luce.config import values
from luce.config.directories import user_state_directory
from luce.config.environment import environment
from luce.config.sampling import SAMPLERS
from luce.config.settings import sampling_default
from luce.engine.events import FinishReason
from luce.errors import LuceError, UsageError

#: /read asks before it reads files above the first size, and refuses files above the second
_ASK_BYTES, _MOST_BYTES = 100 << 10, 16 << 20
_SWITCHES = ("verbose", "wordwrap", "nohistory")
_LEAVING = {"exit", "quit"}
#: groups of the settings that this verb takes
SETTINGS = (*LOADED, "sampling")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, how the conversation looks, and the flags of the settings."""
    add_model(parser)
    parser.add_argument("-s", "--system", metavar="TEXT", help="system message")
    parser.add_argument("--plain", action="store_true", help="no colours, no Markdown (also with NO_COLOR)")
    add_settings(parser, SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Run the conversation until the user leaves. From a pipe, the exit status is that of the last error."""
    config = settings(arguments)
    path = fetch(arguments.model)
    with progress.shown(f"loading {path.name}") as wait:
        model = open_model(path, config, wait.share)
    with model:
        return talk(model, system=arguments.system, plain=arguments.plain)


def talk(model: Model, *, system: str | None = None, plain: bool = False) -> int:
    """The conversation with a loaded model. Raises UsageError if it has no chat template."""
    if model.chat.template is None:
        raise UsageError(f"{model.path}: the file has no chat template; set --chat-template, or use luce run")
    plain = plain or environment("NO_COLOR") is not None
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        notes = Console(stderr=True, highlight=False, markup=False)
        return Chat(model, PipeInput(sys.stdin), notes, system=system, rendered=None, interactive=False).talk()
    folder = user_state_directory()
    history = open_history(folder / "history")
    terminal = TerminalInput(history=history, completer=_completer(), plain=plain)
    console = Console(highlight=False, markup=False, no_color=plain)
    chat = Chat(model, terminal, console, system=system, rendered=None if plain else console, interactive=True)
    chat.history = history if isinstance(history, HistoryFile) else None
    console.print(f"{printable(model.name)} · {model.context:,} tokens of context · /? for help, /bye to leave")
    return chat.talk()


class Chat:
    """One conversation, its settings, and its commands.

    rendered: the terminal for replies as Markdown, None for plain text.
    """

    def __init__(
        self,
        model: Model,
        source: Input,
        notes: Console,
        *,
        system: str | None,
        rendered: Console | None,
        interactive: bool,
    ) -> None:
        self.model = model
        self.conversation = Conversation(system)
        self.options: dict[str, Any] = {}
        self.switches = {"verbose": False, "wordwrap": True, "nohistory": False}
        self.history: HistoryFile | None = None
        self._source = source
        self._notes = notes
        self._rendered = rendered
        self._interactive = interactive
        self._file = ""
        self._status = 0

    def talk(self) -> int:
        """Read and answer until the input ends."""
        while True:
            try:
                text = self._source.read()
                if text in _LEAVING or not self.handle(text):
                    return self._status
            except EOFError:
                return self._status
            except KeyboardInterrupt:  # between a prompt and a reply
                if not self._interactive:
                    raise

    def handle(self, text: str) -> bool:
        """Handle a message or command; False if it ends the conversation."""
        name, _, rest = text.partition(" ")
        try:
            # A message may begin with a path such as /usr/bin.
            if not name.startswith("/") or "/" in name[1:]:
                self._send(text)
            elif name in _LEAVE:
                return False
            elif name in COMMANDS:
                COMMANDS[name].run(self, rest.strip())
            else:
                raise UsageError(f"{name}: unknown command; /? lists the commands")
        except LuceError as error:
            self._notes.print(f"luce: {printable(str(error))}", style="red")
            if not self._interactive:
                self._status = error.exit_code
        return True

    def note(self, text: str) -> None:
        """A dim line about the conversation."""
        self._notes.print(text, style="bright_black")

    # Replies.

    def _send(self, text: str) -> None:
        before = list(self.conversation.messages)
        self.conversation.add("user", f"{self._file}\n\n{text}" if self._file else text)
        if self._answer(before):
            self._file = ""

    def _answer(self, before: list[Message], seed: int | None = None) -> bool:
        """Generate a reply to the last message. Without a reply (stopped before its first token, or an error), restore
        the messages `before` and return False or raise the error."""
        reply: ReplyWriter = PlainWriter(sys.stdout)
        if self._rendered is not None and self.switches["wordwrap"]:
            reply = MarkdownWriter(self._rendered)
        sampling = self.options if seed is None else {**self.options, "seed": seed}
        with Interrupt() as interrupt, no_echo() if self._interactive else contextlib.nullcontext():
            turn = Turn(self.model, reply, interrupt)
            try:
                turn.run(self.conversation.for_template(), sampling)
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
            finally:
                if turn.answered:
                    self.conversation.add("assistant", "".join(turn.pieces), stopped=interrupt.pressed)
                else:
                    self.conversation.messages = before
        self._after(turn, stopped=interrupt.pressed)
        return turn.answered

    def _after(self, turn: Turn, *, stopped: bool) -> None:
        """The line below a reply: its speed, and the reason if it was cut off."""
        finish = turn.finish
        if self._interactive or self.switches["verbose"]:
            self.note(turn.speed(self.model.context))
        if stopped:
            self.note("(stopped)")
        elif finish is not None and finish.reason is FinishReason.CONTEXT:
            self.note("(the context is full: use /undo or /clear)")
        elif finish is not None and finish.reason is FinishReason.LENGTH:
            self.note("(cut at max_tokens)")
        if self.switches["verbose"] and finish is not None:
            timings = finish.timings
            self.note(
                f"{finish.reason.value} · seed {finish.seed} · queued {timings.queued:.3f} s"
                f" · prompt {timings.prompt:.3f} s · reply {timings.predicted:.3f} s"
            )

    # Commands.

    def help(self, rest: str) -> None:
        """List the commands and keys."""
        table = Table(box=None, show_header=False)
        seen: dict[str, list[str]] = {}
        for name, command in {**COMMANDS, **_LEAVE}.items():
            seen.setdefault(f"{command.arguments}\0{command.help}", []).append(name)
        for key, names in seen.items():
            arguments, _, text = key.partition("\0")
            table.add_row(f"{' '.join(names)} {arguments}".rstrip(), text)
        for keys, text in _KEYS.items():
            table.add_row(keys, text)
        self._notes.print(table)

    def clear(self, rest: str) -> None:
        """Forget the messages."""
        self.conversation.messages.clear()
        self._file = ""
        self.note("the conversation is empty")

    def regen(self, rest: str) -> None:
        """Generate another reply to the last message."""
        seed = options.parse("seed", rest, "/regen") if rest else None
        if not self.conversation.messages:
            raise UsageError("/regen: there is no message yet")
        before = list(self.conversation.messages)
        self.conversation.drop_reply()
        self._answer(before, seed)

    def undo(self, rest: str) -> None:
        """Drop the last turn."""
        text = self.conversation.drop_turn()
        if text is None:
            raise UsageError("/undo: there is no message yet")
        self.note(f"dropped: {_short(text)}")

    def retry(self, rest: str) -> None:
        """Edit the last message and send it again."""
        before = list(self.conversation.messages)
        text = self.conversation.drop_turn()
        if text is None:
            raise UsageError("/retry: there is no message yet")
        try:
            text = rest or self._source.read(text)
        except EOFError:
            self.conversation.messages = before
            raise
        self.conversation.add("user", text)
        self._answer(before)

    def edit(self, rest: str) -> None:
        """Write a message in the editor."""
        self._send(self._source.read(rest, editor=True))

    def set(self, rest: str) -> None:
        """Show or change a setting."""
        name, _, value = rest.partition(" ")
        name, value = name.replace("-", "_"), value.strip()
        if not name:
            self.show_parameters()
        elif name == "system":
            self.conversation.system = value or None
            self.note("system message set" if value else "no system message")
        elif name in _SWITCHES:
            self._switch(name, value)
        elif name == "parameter" and value:  # as Ollama spells it
            self.set(value)
        elif not value:
            if name not in options.NAMES:
                options.parse(name, "", "/set")
            self.note(f"{name} {self._parameter(name)}")
        elif value == "default" and name in options.NAMES:
            self.options.pop(name, None)
            self.note(f"{name} {self._parameter(name)}")
        else:
            self.options[name] = options.parse(name, value, f"/set {name}")
            self.note(f"{name} {self.options[name]}")

    def _switch(self, name: str, value: str) -> None:
        if value not in ("", "on", "off"):
            raise UsageError(f"/set {name}: expected on or off, got {value!r}")
        self.switches[name] = value != "off"
        if self.history is not None:
            self.history.enabled = not self.switches["nohistory"]
        self.note(f"{name} {'on' if self.switches[name] else 'off'}")

    def show(self, rest: str) -> None:
        """Show one topic."""
        if rest not in _TOPICS:
            raise UsageError(f"/show: expected {' or '.join(_TOPICS)}, got {rest!r}")
        _TOPICS[rest](self)

    def show_info(self) -> None:
        """The model."""
        spec = self.model.spec
        rows = {
            "name": printable(self.model.name),
            "file": str(self.model.path),
            "family": spec.family,
            "layers": len(spec.layers),
            "hidden": f"{spec.hidden:,}",
            "vocabulary": f"{spec.vocab:,}",
            "context": f"{self.model.context:,} of {spec.context_length:,} tokens",
        }
        self._table(rows)

    def show_parameters(self) -> None:
        """The sampling values and switches in force."""
        rows: dict[str, Any] = {name: self._parameter(name) for name in options.NAMES}
        rows |= {name: "on" if on else "off" for name, on in self.switches.items()}
        self._table(rows)

    def show_system(self) -> None:
        """The system message."""
        self._notes.print("none" if self.conversation.system is None else printable(self.conversation.system))

    def show_template(self) -> None:
        """The source of the chat template."""
        assert self.model.chat.template is not None
        self._notes.print(printable(self.model.chat.template.source))

    def show_tokens(self) -> None:
        """The number of tokens of each message."""
        rows = {
            f"{i}. {message.role}": f"{len(self.model.tokenize(message.content, specials=False)):,}"
            for i, message in enumerate(self.conversation.messages, 1)
        }
        total = 0
        if self.conversation.messages:
            total = len(self.model.chat.prompt(self.conversation.for_template(), add_generation_prompt=False))
        self._table({**rows, "with the template": f"{total:,} of {self.model.context:,}"})

    def show_devices(self) -> None:
        """The devices and their layers."""
        table = Table("device", "layers", "weights", "state", box=None)
        for shard in self.model.placement:
            first, last = shard["layers"]
            sizes = (f"{shard[name] / 2**20:,.1f} MiB" for name in ("weights", "state"))
            table.add_row(shard["device"], f"{first}..{last}", *sizes)
        self._notes.print(table)

    def _table(self, rows: dict[str, Any]) -> None:
        table = Table(box=None, show_header=False)
        for name, value in rows.items():
            table.add_row(name, str(value))
        self._notes.print(table)

    def _parameter(self, name: str) -> Any:
        """The value in force: set here, or the default."""
        if name in self.options:
            return self.options[name]
        value = sampling_default(self.model.config, name)
        return SAMPLERS[name].unset if value is None else value

    def save(self, rest: str) -> None:
        """Save the conversation under a name."""
        files.write(files.saved(rest, "/save"), self.conversation.json())
        self.note(f"saved; /load {rest} continues it")

    def load(self, rest: str) -> None:
        """Continue a saved conversation."""
        self.conversation = files.read(files.saved(rest, "/load"))
        count = len(self.conversation.messages)
        self.note(f"{count} messages" if count != 1 else "1 message")

    def export(self, rest: str) -> None:
        """Write the conversation to a file of the user's choice."""
        path = _path(rest, "/export")
        if path.suffix not in (".md", ".json"):
            raise UsageError(f"/export: expected a file name that ends in .md or .json, got {rest!r}")
        if path.exists() and not self._source.ask(f"{path} exists; replace it?"):
            return
        markdown = path.suffix == ".md"
        files.write(path, self.conversation.markdown().encode() if markdown else self.conversation.json())
        self.note(f"wrote {path}")

    def read(self, rest: str) -> None:
        """Put a text file in front of the next message."""
        path = _path(rest, "/read")
        try:
            size = path.stat().st_size
            if size > _MOST_BYTES:
                raise UsageError(f"/read {path}: {size:,} bytes exceed the limit of {_MOST_BYTES:,}")
            if size > _ASK_BYTES and not self._source.ask(f"{path} has {size:,} bytes; read it?"):
                return
            content = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"/read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"/read {path}: not a text file in UTF-8") from None
        self._file = f"{self._file}\n\n{content}".strip()
        self.note(f"{path}, {size:,} bytes: added in front of your next message")


def _path(text: str, command: str) -> Path:
    """The path argument of a command. Raises UsageError."""
    try:
        return values.path(text)
    except ValueError as error:
        raise UsageError(f"{command}: {error}, got {text!r}") from None


@dataclass(frozen=True)
class Command:
    """A command of the chat."""

    run: Callable[[Chat, str], None]
    #: placeholders of its arguments in the help
    arguments: str
    help: str


#: the topics of /show
_TOPICS: dict[str, Callable[[Chat], None]] = {
    "info": Chat.show_info,
    "parameters": Chat.show_parameters,
    "system": Chat.show_system,
    "template": Chat.show_template,
    "tokens": Chat.show_tokens,
    "devices": Chat.show_devices,
}
COMMANDS = {
    "/help": Command(Chat.help, "", "this list"),
    "/?": Command(Chat.help, "", "this list"),
    "/clear": Command(Chat.clear, "", "forget the conversation"),
    "/reset": Command(Chat.clear, "", "forget the conversation"),
    "/regen": Command(Chat.regen, "[SEED]", "another reply to the last message"),
    "/undo": Command(Chat.undo, "", "drop the last message and its reply"),
    "/retry": Command(Chat.retry, "[TEXT]", "edit the last message and send it again"),
    "/edit": Command(Chat.edit, "[TEXT]", "write a message in $VISUAL or $EDITOR"),
    "/read": Command(Chat.read, "PATH", "put a text file in front of the next message"),
    "/set": Command(
        Chat.set, "[NAME [VALUE]]", "settings; also system, verbose, wordwrap, nohistory; VALUE may be default"
    ),
    "/show": Command(Chat.show, "|".join(_TOPICS), "show the model, settings, template, token counts or devices"),
    "/save": Command(Chat.save, "NAME", "save the conversation"),
    "/load": Command(Chat.load, "NAME", "continue a saved conversation"),
    "/export": Command(Chat.export, "FILE.md|FILE.json", "write the conversation to a file"),
}
_LEAVE = dict.fromkeys(
    ("/bye", "/exit", "/quit"), Command(lambda chat, rest: None, "", "leave; so do exit, quit, Ctrl+D")
)
_KEYS = {
    '"""': "begins and ends a message of several lines; a trailing \\ continues a line",
    "Alt+Enter Ctrl+J": "new line in a message",
    "Ctrl+G": "write in the editor",
    "Ctrl+R, Up": "earlier messages",
    "Ctrl+C": "stop a reply; at the prompt clear the line, twice leave",
}


def _completer() -> CommandCompleter:
    words: dict[str, Any] = dict.fromkeys((*COMMANDS, *_LEAVE), ())
    words["/set"] = (*options.NAMES, "system", *_SWITCHES)
    words["/show"] = _TOPICS
    words["/load"] = words["/save"] = files.saved_names
    words["/read"] = words["/export"] = None
    return CommandCompleter(words)


def _short(text: str) -> str:
    line = printable(text).replace("\n", " ")
    return line if len(line) <= 60 else line[:59] + "…"
