"""The recording of README.md and the picture of docs/guide/chat.md: a conversation with smollm2 at a real terminal.

python -m tools.record_terminal

A shell at a pseudo-terminal gets COMMAND and QUESTIONS as keys; what its screen shows becomes docs/figures/chat.svg,
which moves by CSS alone, and its last screen docs/figures/chat-still.svg. Times are real, but for waits over
LONGEST_WAIT, which are cut to it. Needs the extra `test` and the model (luce pull smollm2).
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from html import escape
from itertools import groupby
from pathlib import Path

import pexpect
import pyte
from pyte.screens import Char

from tools.terminal import Terminal

FOLDER = Path(__file__).resolve().parent.parent / "docs/figures"
ROWS, COLUMNS = 16, 84
#: keys, and the text that the last line but those below shows before the next keys
PROMPT, HINT, SPEED = "$ ", "a message, or /? for help", "tok/s"
COMMAND = "luce chat smollm2 --temperature 0"
QUESTIONS = ("What is the capital of France?", "Name three of its museums, as a list.")
#: seconds between keys, between looks at the screen, at most between two frames, and of the last frame
KEY, LOOK, LONGEST_WAIT, END = 0.04, 0.05, 1.2, 4.0
#: seconds until a text must have come, also while the model is loaded
PATIENCE = 180.0
#: size of a character and of the border, pixels
WIDTH, HEIGHT, BORDER = 8.4, 18, 14
BACKGROUND, FOREGROUND = "#16181d", "#d7dae0"
COLOURS = {
    "black": "#16181d", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b", "blue": "#61afef",
    "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#d7dae0", "brightblack": "#7f848e", "brightred": "#ef8089",
    "brightgreen": "#b1d995", "brightbrown": "#f0d197", "brightblue": "#82c3f7", "brightmagenta": "#d79aeb",
    "brightcyan": "#7fd0da", "brightwhite": "#ffffff",
}  # fmt: skip


@dataclass
class Recording:
    """Screens and when they were first seen, and the lines of all of them, each once."""

    lines: dict[str, int] = field(default_factory=dict)
    frames: list[tuple[float, list[int]]] = field(default_factory=list)

    def look(self, screen: pyte.Screen, now: float) -> None:
        """Keep the screen if it has changed."""
        rows = [drawn(screen, row) for row in range(ROWS)]
        numbers = [self.lines.setdefault(row, len(self.lines)) for row in rows]
        if not self.frames or self.frames[-1][1] != numbers:
            self.frames.append((now, numbers))

    def times(self) -> list[float]:
        """When each frame begins, seconds, and the end of the last."""
        times, total = [], 0.0
        for (now, _), (after, _) in zip(self.frames, self.frames[1:], strict=False):
            times.append(total)
            total += min(after - now, LONGEST_WAIT)
        return [*times, total, total + END]


def style(char: Char) -> str:
    """The attributes of a character's text."""
    colour = FOREGROUND if char.fg == "default" else COLOURS.get(char.fg, f"#{char.fg}")
    words = [f'fill="{colour}"'] if colour != FOREGROUND else []
    words += ['font-weight="bold"'] if char.bold else []
    words += ['font-style="italic"'] if char.italics else []
    return " ".join(words)


def drawn(screen: pyte.Screen, row: int) -> str:
    """A row of the screen as SVG at the top of the picture; the cursor is a block."""
    chars = [screen.buffer[row][column] for column in range(COLUMNS)]
    parts = []
    if screen.cursor.y == row and not screen.cursor.hidden:
        x = screen.cursor.x * WIDTH
        parts.append(f'<rect x="{x:.1f}" y="3" width="{WIDTH}" height="{HEIGHT - 2}" fill="#7f848e"/>')
    column = 0
    for words, group in groupby(chars, style):
        text = "".join(char.data for char in group)
        if text.strip():
            x = (column + len(text) - len(text.lstrip())) * WIDTH
            shown = text.strip()
            size = f'y="{HEIGHT - 4}" textLength="{len(shown) * WIDTH:.1f}"'
            parts.append(f'<text x="{x:.1f}" {size} {words}>{escape(shown)}</text>')
        column += len(text)
    return "".join(parts)


class Session(Terminal):
    """A shell whose screen is recorded."""

    def __init__(self, home: Path) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "PS1": PROMPT, "STATE_DIRECTORY": str(home)}
        super().__init__(["bash", "--norc", "--noprofile"], rows=ROWS, columns=COLUMNS, env=env)
        self.recording = Recording()

    def watch(self, seconds: float) -> None:
        """Record what the screen shows in this time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(pexpect.TIMEOUT):
                self.read(min(LOOK, left))
            self.recording.look(self.screen, time.monotonic())

    def until(self, shown: Callable[[], bool]) -> None:
        """Record until the screen shows something; RuntimeError if it does not come."""
        end = time.monotonic() + PATIENCE
        while not shown():
            if time.monotonic() > end:
                raise RuntimeError("the terminal does not show what was awaited:\n" + self.text)
            self.watch(LOOK)

    def type(self, text: str) -> None:
        """Type a line, as a person would."""
        for key in [*text, "\r"]:
            self.send(key)
            self.watch(KEY)

    def replied(self, replies: int) -> bool:
        """Whether more replies than so many have ended."""
        return self.count(SPEED) > replies

    def count(self, text: str) -> int:
        """How many rows show a text."""
        return sum(text in row for row in self.screen.display)


def record(home: Path) -> Recording:
    """The conversation, from the command to the last reply."""
    session = Session(home)
    session.until(lambda: session.count(PROMPT) == 1)
    session.watch(0.5)
    session.type(COMMAND)
    for number, question in enumerate(QUESTIONS):
        session.until(lambda: session.count(HINT) == 1)
        session.watch(0.8)
        session.type(question)
        session.until(partial(session.replied, number))
        session.until(lambda: session.count(HINT) == 1)
    session.watch(0.3)
    session.close()
    return session.recording


def picture(recording: Recording, moving: bool) -> str:
    """An SVG of all frames, one after the other, or of the last one."""
    width, height = COLUMNS * WIDTH + 2 * BORDER, ROWS * HEIGHT + 2 * BORDER
    frames = recording.frames if moving else recording.frames[-1:]
    used = {number for _, numbers in frames for number in numbers}
    lines = [f'<g id="l{number}">{line}</g>' for line, number in recording.lines.items() if number in used and line]
    blank = {number for line, number in recording.lines.items() if not line}
    rows = []
    for position, (_, numbers) in enumerate(frames):
        top = position * ROWS * HEIGHT
        rows += [
            f'<use href="#l{number}" y="{top + row * HEIGHT}"/>'
            for row, number in enumerate(numbers)
            if number not in blank
        ]
    rules = f"#s{{transform:translateY({-(len(frames) - 1) * ROWS * HEIGHT}px)}}"
    if moving:
        *begins, end = recording.times()
        steps = "".join(
            f"{100 * begin / end:.2f}%{{transform:translateY({-position * ROWS * HEIGHT}px)}}"
            for position, begin in enumerate(begins)
        )
        last = f"100%{{transform:translateY({-(len(frames) - 1) * ROWS * HEIGHT}px)}}"
        rules += f"@keyframes s{{{steps}{last}}}"
        rules += f"@media (prefers-reduced-motion:no-preference){{#s{{animation:s {end:.2f}s step-end infinite}}}}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}">',
            f"<title>{escape(COMMAND)}</title>",
            f"<style>{rules}text{{white-space:pre}}</style>",
            f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
            f"<defs>{''.join(lines)}</defs>",
            f'<svg x="{BORDER}" y="{BORDER}" width="{COLUMNS * WIDTH:.0f}" height="{ROWS * HEIGHT}">',
            f'<g id="s" fill="{FOREGROUND}" font-size="14" font-family="ui-monospace,Menlo,Consolas,monospace">',
            *rows,
            "</g></svg></svg>\n",
        ]
    )


def main() -> int:
    """Record, and write both pictures."""
    with tempfile.TemporaryDirectory() as home:
        recording = record(Path(home))
    (FOLDER / "chat.svg").write_text(picture(recording, moving=True))
    (FOLDER / "chat-still.svg").write_text(picture(recording, moving=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
