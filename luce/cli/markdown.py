"""Writes a reply to the terminal as Markdown while it is generated.

Finished Markdown blocks are printed once and the open one is redrawn, with the speed below it. Reasoning is dim, and
folded into one line when the reply begins. Control characters are removed before anything else (plain_writer.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown
from rich.syntax import Syntax
from rich.text import Text

from luce.cli.plain_writer import printable

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_TAIL = re.compile(r"(?: |\x1b\[[0-9;]*m)+$")
# Drawing takes at most this share of the time: long open blocks are drawn less often.
_SHARE = 0.25
_SECONDS = 0.03
#: lines of the reasoning that show before it is folded
_THOUGHT_LINES = 3
_FENCE = re.compile(r"\s*(?:```[^`\n]*\n|~~~)")


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
    not change. fold: only the last lines of the reasoning show, and one line about it when the reply begins.
    """

    def __init__(self, console: Console, *, fold: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._fold = fold
        self._clock = clock
        self._open = ""
        #: the reasoning that may still change on the screen, and when it began
        self._thought = ""
        self._thinking_since: float | None = None
        #: shown below the open part
        self.status = ""
        self._finished = False
        #: lines on the screen that may still change; the cursor is at the end of the last one
        self._shown: list[str] = []
        self._width = console.width
        self._due = 0.0

    def reason(self, text: str) -> None:
        """Add reasoning. It is drawn soon, dim."""
        if self._thinking_since is None:
            self._thinking_since = self._clock()
        self._thought += printable(text)
        self._draw_soon(self._thought_parts)

    def write(self, text: str) -> None:
        """Add text. It is drawn soon: not every token causes a redraw."""
        if self._thinking_since is not None:
            self._draw(self._take_thought(), [""])  # the cursor leaves the finished line
            self._due = 0.0
        self._open += printable(text)
        self._draw_soon(self._parts)

    def end_reasoning(self) -> None:
        """Leave an empty line below the reasoning."""
        if self._thinking_since is not None:
            self.write("")
            self.end()

    def end(self) -> None:
        """Show the rest and begin a new line."""
        thought = self._take_thought() if self._thinking_since is not None else []
        lines = [*thought, *self._lines(self._open)]
        self._open = ""
        self._draw(lines, [])
        if lines or self._finished:
            self._emit("\n")

    def _draw_soon(self, parts: Callable[[], tuple[list[str], list[str]]]) -> None:
        """Draw the finished lines and the open ones, unless that was just done."""
        started = self._clock()
        if started >= self._due:
            finished, window = parts()
            status = [self._dim(self.status, self._console.width - 1)[0]] if self.status else []
            self._draw(finished, [*window, *status])
            self._due = started + max(_SECONDS, (self._clock() - started) / _SHARE)

    def _parts(self) -> tuple[list[str], list[str]]:
        finished = self._take_finished()
        window = self._lines(self._open)
        if not _FENCE.match(self._open):
            window = window[1 + bool(self.status) - self._console.height :]
        return finished, window

    def _thought_parts(self) -> tuple[list[str], list[str]]:
        if self._fold:
            # More than three lines of the widest screen are not needed.
            return [], self._dim(self._thought[-2000:])[-_THOUGHT_LINES:]
        whole, newline, self._thought = self._thought.rpartition("\n")
        finished = self._dim(whole) if newline else []
        self._finished = self._finished or bool(finished)
        return finished, self._dim(self._thought)[2 - self._console.height :]

    def _take_thought(self) -> list[str]:
        """The lines that stay of the reasoning, which is over."""
        assert self._thinking_since is not None
        seconds, self._thinking_since = self._clock() - self._thinking_since, None
        text = f"▸ thought for {seconds:.1f} s" if self._fold else self._thought
        self._thought = ""
        self._finished = True
        return self._dim(text) if text else []

    def _dim(self, text: str, width: int | None = None) -> list[str]:
        """The lines of a text in dim letters; `width`: cut at this many columns, not wrapped."""
        shown = Text(text, style="dim", no_wrap=width is not None, overflow="fold" if width is None else "ellipsis")
        with self._console.capture() as capture:
            self._console.print(shown, width=width)
        return [_TAIL.sub(_reset, line) for line in capture.get().removesuffix("\n").split("\n")]

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
