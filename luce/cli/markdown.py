"""Writes a reply to the terminal while it is generated: plain, or as Markdown.

As Markdown, finished Markdown blocks are printed once and the open one is redrawn. The model's text is untrusted:
control characters are removed before anything else, so that it cannot move the cursor, change the title or write the
clipboard.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol, TextIO

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown
from rich.syntax import Syntax

_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_TAIL = re.compile(r"(?: |\x1b\[[0-9;]*m)+$")
# Drawing takes at most this share of the time: long open blocks are drawn less often.
_SHARE = 0.25
_SECONDS = 0.03
_FENCE = re.compile(r"\s*(?:```[^`\n]*\n|~~~)")


def printable(text: str) -> str:
    """The text without control characters (C0, DEL, C1) other than newline and tab."""
    return text.translate(_CONTROL)


class ReplyWriter(Protocol):
    """Writes the text of one reply."""

    def write(self, text: str) -> None:
        """Show more text."""

    def end(self) -> None:
        """Show the rest and begin a new line."""


class PlainWriter:
    """Writes the text unchanged, except for control characters."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._last = "\n"

    def write(self, text: str) -> None:
        """Show more text."""
        text = printable(text)
        if text:
            self._file.write(text)
            self._file.flush()
            self._last = text[-1]

    def end(self) -> None:
        """Begin a new line unless one has begun."""
        if self._last != "\n":
            self._file.write("\n")
            self._file.flush()


class _Code(CodeBlock):
    """A code block that can be copied from the terminal: no frame, no background."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip("\n")
        yield Syntax(code, self.lexer_name, theme="ansi_dark", background_color="default", word_wrap=True)


class _Blocks(Markdown):
    """Some top-level blocks of a text, already parsed."""

    elements: ClassVar = {**Markdown.elements, "fence": _Code, "code_block": _Code}

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = tokens


# HTML stays visible as text (rich would drop it), and so does a link definition, which may follow its use.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("reference")


def blocks(text: str) -> Iterator[tuple[int, list[Token]]]:
    """The top-level blocks of a Markdown text: (first line, tokens)."""
    tokens: list[Token] = []
    depth = 0
    for token in _PARSER.parse(text):
        tokens.append(token)
        for child in token.children or ():
            if child.type == "softbreak":  # models mean their line breaks
                child.type = "hardbreak"
        depth += token.nesting
        if depth == 0:
            assert tokens[0].map is not None
            yield tokens[0].map[0], tokens
            tokens = []


def _reset(tail: re.Match[str]) -> str:
    return "\x1b[0m" if "\x1b" in tail.group() else ""


class MarkdownWriter:
    """Writes Markdown to a terminal.

    The open part is at most as high as the screen: only the end of a longer block is shown until the block is finished,
    because lines that have scrolled off the screen cannot be redrawn. Only code scrolls while it is open: its lines do
    not change.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._open = ""
        self._finished = False
        #: lines on the screen that may still change; the cursor is at the end of the last one
        self._shown: list[str] = []
        self._width = console.width
        self._due = 0.0

    def write(self, text: str) -> None:
        """Add text. It is drawn soon: not every token causes a redraw."""
        self._open += printable(text)
        started = self._clock()
        if started >= self._due:
            finished = self._take_finished()
            window = self._lines(self._open)
            if not _FENCE.match(self._open):
                window = window[1 - self._console.height :]
            self._draw(finished, window)
            self._due = started + max(_SECONDS, (self._clock() - started) / _SHARE)

    def end(self) -> None:
        """Show the rest and begin a new line."""
        lines = self._lines(self._open)
        self._open = ""
        self._draw(lines, [])
        if lines or self._finished:
            self._emit("\n")

    def _take_finished(self) -> list[str]:
        """Remove the blocks that can no longer change from the open text, and return their lines.

        A block is finished when a later one begins with a complete line: `2` may still become the list item `2. b`.
        """
        whole = self._open[: self._open.rfind("\n") + 1]
        starts = [first for first, _ in blocks(whole)]
        if len(starts) < 2:
            return []
        cut = sum(len(line) + 1 for line in whole.split("\n")[: starts[-1]])
        lines = self._lines(self._open[:cut])
        self._open = self._open[cut:]
        self._finished = True
        return lines

    def _lines(self, text: str) -> list[str]:
        """The rendered lines of blocks, with an empty line before each but the first of the reply."""
        lines: list[str] = []
        for _, tokens in blocks(text):
            with self._console.capture() as capture:
                self._console.print(_Blocks(tokens))
            rendered = capture.get().split("\n")
            filled = [i for i, line in enumerate(rendered) if _STYLE.sub("", line).strip()] or [0]
            if lines or self._finished:
                lines.append("")
            # rich pads lines with spaces, which a user would copy with the text.
            lines += [_TAIL.sub(_reset, line) for line in rendered[filled[0] : filled[-1] + 1]]
        return lines

    def _draw(self, finished: Sequence[str], window: list[str]) -> None:
        """Replace the open lines by finished lines and the new open lines below them."""
        lines = [*finished, *window]
        if not lines and not self._shown:
            return
        same = 0
        while same < min(len(lines), len(self._shown)) - 1 and lines[same] == self._shown[same]:
            same += 1
        # A screen that is narrower than before has wrapped the lines drawn before.
        width, height = self._console.size
        heights = [max(1, -(-cell_len(_STYLE.sub("", line)) // width)) for line in self._shown]
        if width != self._width and sum(heights) > height:
            # Lines that scrolled off the screen would wrap elsewhere now: print them again rather than lose them.
            self._emit("\n")
            same, heights = 0, []
        while (rows := sum(heights[same:])) > height:  # off the screen: cannot be redrawn
            same += 1
        up = f"\x1b[{rows - 1}A" if rows > 1 else ""
        # Erase first: after a line as wide as the screen, erasing would remove its last character. A terminal that
        # knows the two marks shows nothing half drawn between them.
        self._emit(f"\x1b[?2026h\r{up}\x1b[J" + "\n".join(lines[same:]) + "\x1b[?2026l")
        self._shown = window
        self._width = width

    def _emit(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()
