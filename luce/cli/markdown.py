"""A reply on the terminal while it grows: as Markdown, finished blocks printed once and the open one redrawn, or raw.

The model's text is untrusted: control characters are taken out before anything else, so that it cannot move the cursor,
change the title or write the clipboard.
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
# Drawing may take this share of the time: with long open blocks it gets rarer, not slower.
_SHARE = 0.25
_SECONDS = 0.03
_FENCE = re.compile(r"\s*(?:```[^`\n]*\n|~~~)")


def printable(text: str) -> str:
    """The text without control characters (C0, DEL, C1) other than newline and tab."""
    return text.translate(_CONTROL)


class Reply(Protocol):
    """Where the text of one reply goes."""

    def write(self, text: str) -> None:
        """Show more text."""

    def end(self) -> None:
        """Show what is left and begin a new line."""


class RawReply:
    """The text as it comes."""

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


# HTML stays visible as text (rich would drop it), and so does a link definition, which may come after its use.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("reference")


def blocks(text: str) -> Iterator[tuple[int, list[Token]]]:
    """The top-level blocks of a Markdown text: (first line, tokens)."""
    tokens: list[Token] = []
    depth = 0
    for token in _PARSER.parse(text):
        tokens.append(token)
        for child in token.children or ():
            if child.type == "softbreak":  # models break lines where they mean it
                child.type = "hardbreak"
        depth += token.nesting
        if depth == 0:
            assert tokens[0].map is not None
            yield tokens[0].map[0], tokens
            tokens = []


def _reset(tail: re.Match[str]) -> str:
    return "\x1b[0m" if "\x1b" in tail.group() else ""


class MarkdownReply:
    """Markdown on a terminal.

    What is open is at most a screen high: of a longer block the end is shown until the block is finished, as what has
    left the screen cannot be redrawn. Only code scrolls away while it is open: its lines stay as they are.

    `_shown` are the lines on the screen that may still change; the cursor is at the end of the last of them.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._open = ""
        self._finished = False
        self._shown: list[str] = []
        self._width = console.width
        self._due = 0.0

    def write(self, text: str) -> None:
        """Show more text, soon: not every token is drawn."""
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
        """Show what is left and begin a new line."""
        lines = self._lines(self._open)
        self._open = ""
        self._draw(lines, [])
        if lines or self._finished:
            self._emit("\n")

    def _take_finished(self) -> list[str]:
        """Cut off the blocks that cannot change any more, and return their lines.

        A block is finished when a later one begins on a whole line: `2` may still become the list item `2. b`.
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
        """The rendered lines of some blocks, an empty line before each but the reply's first."""
        lines: list[str] = []
        for _, tokens in blocks(text):
            with self._console.capture() as capture:
                self._console.print(_Blocks(tokens))
            rendered = capture.get().split("\n")
            filled = [i for i, line in enumerate(rendered) if _STYLE.sub("", line).strip()] or [0]
            if lines or self._finished:
                lines.append("")
            # rich fills lines up with spaces, which would be copied with the text.
            lines += [_TAIL.sub(_reset, line) for line in rendered[filled[0] : filled[-1] + 1]]
        return lines

    def _draw(self, finished: Sequence[str], window: list[str]) -> None:
        """Print finished lines in the place of the open ones, and the new open ones below them."""
        lines = [*finished, *window]
        if not lines and not self._shown:
            return
        same = 0
        while same < min(len(lines), len(self._shown)) - 1 and lines[same] == self._shown[same]:
            same += 1
        # A screen that got narrower has wrapped the lines that were drawn before.
        width, height = self._console.size
        heights = [max(1, -(-cell_len(_STYLE.sub("", line)) // width)) for line in self._shown]
        if width != self._width and sum(heights) > height:
            # Lines that have left the screen would break elsewhere now. Rather twice than not at all.
            self._emit("\n")
            same, heights = 0, []
        while (rows := sum(heights[same:])) > height:  # off the screen: it keeps the colours it has
            same += 1
        up = f"\x1b[{rows - 1}A" if rows > 1 else ""
        # Erased first: after a line as wide as the screen, erasing would hit its last character. Between the two
        # marks a terminal that knows them shows nothing half drawn.
        self._emit(f"\x1b[?2026h\r{up}\x1b[J" + "\n".join(lines[same:]) + "\x1b[?2026l")
        self._shown = window
        self._width = width

    def _emit(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()
