"""One conversation: what answers it, its settings, its messages, and the next reply."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from luce.cli.markdown import MarkdownWriter
from luce.cli.plain_writer import PlainThoughts, PlainWriter, ReplyWriter, printable
from luce.cli.repl import conversation as files
from luce.cli.repl.attachments import Attachment
from luce.cli.repl.conversation import Conversation, Message
from luce.cli.repl.input import HistoryFile, Input, no_echo
from luce.cli.repl.replier import Replier, Request, Thinking
from luce.cli.repl.turn import Interrupt, Turn
from luce.cli.user_files import write
from luce.engine.events import FinishReason
from luce.errors import ContextError, UsageError

#: characters of a text for each token of the context that are tokenised at once: more than nearly any text has, so
#: that a text far too long is refused by its beginning
_CHARACTERS_PER_TOKEN = 16


@dataclass
class Settings:
    """What `/set` changes."""

    #: sampling values
    sampling: dict[str, Any] = field(default_factory=dict)
    thinking: Thinking = field(default_factory=Thinking)
    #: as in Request
    response_format: Mapping[str, Any] | None = None
    verbose: bool = False
    wordwrap: bool = True
    nohistory: bool = False


@dataclass(frozen=True)
class Screen:
    """Where a session shows what. A chat with the lines of a pipe is not interactive."""

    notes: Console
    #: the terminal for replies as Markdown, None for plain text
    rendered: Console | None = None
    interactive: bool = False


class Session:
    """A conversation and its settings. keep: save it after each reply, for `luce chat --continue`."""

    def __init__(
        self,
        replier: Replier,
        source: Input,
        screen: Screen,
        settings: Settings | None = None,
        *,
        allow_shell: bool = False,
        keep: bool = False,
    ) -> None:
        self.replier = replier
        self.source = source
        self.screen = screen
        self.settings = settings or Settings()
        self.allow_shell = allow_shell
        self.conversation = Conversation()
        #: texts in front of the next message
        self.attachments: list[Attachment] = []
        self.history: HistoryFile | None = None
        self._keep = keep

    def note(self, text: str) -> None:
        """A dim line about the conversation."""
        self.screen.notes.print(printable(text), style="bright_black")

    # Messages.

    def send(self, text: str) -> None:
        """Add a message with its attachments and answer it. Without a reply the conversation stays as it was."""
        before = list(self.conversation.messages)
        self.conversation.add("user", "\n\n".join([*(item.text.strip() for item in self.attachments), text]))
        try:
            if self.answer(before):
                self.attachments.clear()
        except ContextError as error:
            if not self.attachments:
                raise
            raise ContextError(f"{error}; /unread drops {self.attachments[-1].name}") from None

    def answer(self, before: list[Message], seed: int | None = None) -> bool:
        """Generate a reply to the last message. Without a reply (stopped before its first token, or an error), restore
        the messages `before` and return False or raise the error."""
        with Interrupt() as interrupt, no_echo() if self.screen.interactive else contextlib.nullcontext():
            turn = Turn(self.replier, self._writer(), interrupt, self._waiting())
            try:
                turn.run(self.conversation.for_template(), self.request(seed))
            except KeyboardInterrupt:
                if not self.screen.interactive:
                    raise
            finally:
                if turn.answered:
                    self.conversation.add(
                        "assistant", turn.content, stopped=interrupt.pressed, reasoning=turn.reasoning
                    )
                else:
                    self.conversation.messages = before
        self._after(turn, stopped=interrupt.pressed)
        if turn.answered:
            self.save_last()
        return turn.answered

    def request(self, seed: int | None = None) -> Request:
        """What the settings ask of the next reply."""
        sampling = self.settings.sampling if seed is None else {**self.settings.sampling, "seed": seed}
        return Request(dict(sampling), self.settings.thinking.think, self.settings.response_format)

    def attach(self, item: Attachment, origin: str) -> int | None:
        """Put a text in front of the next message. Returns its number of tokens, None if it is not known.

        Raises UsageError, which begins with `origin`, if the text and the conversation do not fit the context.
        """
        tokens = self._fitting(item, origin)
        self.attachments.append(item)
        return tokens

    def save_last(self) -> None:
        """Save the conversation for `luce chat --continue`. A disk that is full is worth a note, not the reply."""
        if self._keep and not self.settings.nohistory:
            try:
                write(files.last(), self.conversation.json())
            except UsageError as error:
                self.note(f"this conversation is not kept: {error}")

    def _fitting(self, item: Attachment, origin: str) -> int | None:
        replier, context = self.replier, self.replier.context
        if context is None:
            return replier.count(item.text)
        messages = list(self.conversation.for_template())
        if self.attachments:
            messages.append({"role": "user", "content": "\n\n".join(each.text for each in self.attachments)})
        used = replier.prompt_tokens(messages)
        head = item.text[: context * _CHARACTERS_PER_TOKEN]
        tokens = replier.count(head)
        if tokens is None or used is None:
            return None
        least = "at least " if len(head) < len(item.text) else ""
        if least and used + tokens < context:
            tokens, least = replier.count(item.text) or tokens, ""
        if used + tokens >= context:  # the reply needs a token as well
            free = max(0, context - used)
            raise UsageError(
                f"{origin}: {least}{tokens:,} tokens do not fit: {free:,} of the context's {context:,} are free"
            )
        return tokens

    # What the user sees of a reply.

    def _writer(self) -> ReplyWriter:
        screen, settings = self.screen, self.settings
        if screen.rendered is not None and settings.wordwrap:
            return MarkdownWriter(screen.rendered, fold=not settings.thinking.shown)
        # Standard output is for the reply where it is no terminal.
        thoughts = sys.stdout if screen.interactive else sys.stderr
        return PlainWriter(sys.stdout, PlainThoughts(thoughts) if settings.thinking.shown else None)

    def _waiting(self) -> Console | None:
        """Where a spinner shows that a reply is waited for."""
        return self.screen.notes if self.screen.interactive else None

    def _after(self, turn: Turn, *, stopped: bool) -> None:
        """The line below a reply: its speed, and the reason if it was cut off."""
        ending, verbose = turn.ending, self.settings.verbose
        if self.screen.interactive or verbose:
            self.note(turn.speed())
        if stopped:
            self.note("(stopped)")
        elif ending is not None and ending.reason == FinishReason.CONTEXT.value:
            self.note("(the context is full: use /undo or /clear)")
        elif ending is not None and ending.reason == FinishReason.LENGTH.value:
            self.note("(cut at max_tokens)")
        if verbose and ending is not None:
            self.note(" · ".join((ending.reason, *ending.details)))
