"""Input of a chat: a terminal with line editing, or a pipe.

A message of several lines stands between triple quotes, or its lines end in a backslash. On a terminal, Alt+Enter and
Ctrl+J also begin a line, and a paste is one message.
"""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.application.run_in_terminal import run_in_terminal
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import completion_is_selected, has_completions, is_searching
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth

_QUOTES = '"""'
_TWICE_SECONDS = 1.0


def in_block(text: str) -> bool:
    """Whether the text has opening triple quotes and no closing ones."""
    return text.lstrip().startswith(_QUOTES) and text.count(_QUOTES) < 2


def message(text: str) -> str:
    """The message in an input: the text between triple quotes, else the text without white space around it."""
    text = text.strip()
    if text.startswith(_QUOTES):
        return text.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")
    return text


class Input(Protocol):
    """A source of messages."""

    def read(self, default: str = "", *, editor: bool = False) -> str:
        """The next message. `default` is the initial text of the line; `editor` opens it in the user's editor first.

        Raises EOFError at the end of the input.
        """

    def ask(self, question: str) -> bool:
        """The answer to a yes-or-no question."""


class PipeInput:
    """Messages from the lines of a pipe. No user can answer, so the answer to every question is yes."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def read(self, default: str = "", *, editor: bool = False) -> str:
        """The next message that is not empty."""
        text = ""
        while line := self._file.readline():
            text += line.rstrip("\n")
            if in_block(text):
                text += "\n"
            elif text.endswith("\\"):
                text = text[:-1] + "\n"
            elif text.strip():
                return message(text)
        if text.strip():
            return message(text)
        raise EOFError

    def ask(self, question: str) -> bool:
        """Yes."""
        return True


class HistoryFile(FileHistory):
    """History in a file, readable by its owner only. New messages are added while `enabled`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.enabled = True
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        os.fchmod(descriptor, 0o600)
        os.close(descriptor)

    def store_string(self, string: str) -> None:
        """Append a message to the file."""
        if self.enabled:
            super().store_string(string)


def open_history(path: Path) -> History:
    """The history in a file, or in memory if the file cannot be written."""
    try:
        return HistoryFile(path)
    except OSError:
        return InMemoryHistory()


class CommandCompleter(Completer):
    """Completes commands and their arguments.

    commands: name with slash -> its possible arguments: words, a function that lists words, or None for a path. A key
    of two words lists the arguments behind the second.
    """

    def __init__(self, commands: dict[str, Iterable[str] | Callable[[], Iterable[str]] | None]) -> None:
        self._commands = commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """Completions of the word before the cursor."""
        command, space, rest = document.text_before_cursor.partition(" ")
        if not space:
            if command.startswith("/"):
                yield from _matching(command, (name for name in self._commands if " " not in name))
            return
        second, space, further = rest.partition(" ")
        if space and f"{command} {second}" in self._commands:
            command, rest = f"{command} {second}", further
        if command in self._commands:
            words = self._commands[command]
            if words is None:
                yield from self._paths.get_completions(Document(rest), complete_event)
            else:
                yield from _matching(rest, words() if callable(words) else words)


def _matching(start: str, words: Iterable[str]) -> Iterator[Completion]:
    for word in words:
        if word.startswith(start):
            yield Completion(word, start_position=-len(start))


class TerminalInput:
    """Messages typed at a terminal."""

    def __init__(self, *, history: History, completer: Completer, plain: bool) -> None:
        self._last_interrupt = -_TWICE_SECONDS
        self._session: PromptSession[str] = PromptSession(
            [("class:prompt", ">>> ")],
            multiline=True,
            history=history,
            completer=completer,
            complete_while_typing=False,
            enable_history_search=True,
            auto_suggest=AutoSuggestFromHistory(),
            key_bindings=self._keys(),
            enable_suspend=True,
            prompt_continuation=[("class:prompt", "... ")],
            placeholder=_placeholder,
            color_depth=ColorDepth.DEPTH_1_BIT if plain else None,
            tempfile_suffix=".md",
        )

    def read(self, default: str = "", *, editor: bool = False) -> str:
        """The next message that is not empty."""
        while True:
            text = self._session.prompt(default=default, pre_run=_open_editor if editor else None)
            if text.strip():
                return message(text)

    def ask(self, question: str) -> bool:
        """Yes only for an answer that begins with y."""
        sys.stdout.write(f"{question} [y/N] ")
        sys.stdout.flush()
        try:
            return sys.stdin.readline().strip().lower().startswith("y")
        except KeyboardInterrupt:
            print()
            return False

    def _keys(self) -> KeyBindings:
        """Keys of our own. While something is searched or completed, prompt_toolkit's have their turn."""
        keys = KeyBindings()

        @keys.add("enter", filter=~is_searching & ~completion_is_selected)
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if in_block(buffer.text):
                buffer.insert_text("\n")
            elif buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
                buffer.delete_before_cursor()
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("enter", filter=completion_is_selected)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.complete_state = None

        @keys.add("escape", "enter", filter=~is_searching)
        @keys.add("c-j", filter=~is_searching)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-g", filter=~is_searching & ~has_completions)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.open_in_editor()

        @keys.add("c-c", filter=has_completions)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.cancel_completion()

        @keys.add("c-c", filter=~is_searching & ~has_completions)
        def _(event: KeyPressEvent) -> None:
            now, last = time.monotonic(), self._last_interrupt
            self._last_interrupt = now
            if event.current_buffer.text:
                event.current_buffer.reset()
            elif now - last < _TWICE_SECONDS:
                event.app.exit(exception=EOFError)
            else:
                run_in_terminal(lambda: print("(press again to leave, or /bye)"))

        return keys


def _placeholder() -> FormattedText:
    """What an empty line shows. A search shows its match there, although the line is still empty."""
    return FormattedText([] if is_searching() else [("ansibrightblack", "a message, or /? for help")])


def _open_editor() -> None:
    get_app().current_buffer.open_in_editor()


@contextlib.contextmanager
def no_echo() -> Iterator[None]:
    """Hide keys pressed meanwhile, which would move the cursor; the next prompt gets them."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    silent = list(before)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
