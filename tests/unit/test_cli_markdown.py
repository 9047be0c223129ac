"""Replies as Markdown, looked at on an emulated terminal."""

from __future__ import annotations

import io
import itertools
import random
import re

import pyte
import pytest
from rich.console import Console

from luce.cli.markdown import MarkdownWriter
from luce.cli.plain_writer import PlainWriter, printable

TEXT = """# A heading

Some *emphasised* text with `code` and a line that is long enough to be wrapped at the width of the screen.
Second line.

- first
- second

    with a paragraph

1. one

2. two

| a | b |
|---|---|
| 1 | 二二 |

```python
def f(x):
    return x  # 10\u00b0

print(f(1))
```

> quoted

last words"""


class Screen:
    """A terminal of 60 columns, with the lines that have scrolled off its top."""

    def __init__(self, rows: int = 20, columns: int = 60) -> None:
        self.emulated = pyte.HistoryScreen(columns, rows, history=10000)
        self.stream = pyte.Stream(self.emulated)
        # A terminal's driver turns a line feed into carriage return and line feed.
        self.emulated.set_mode(pyte.modes.LNM)
        self.sent = io.StringIO()
        self.console = Console(
            file=self.sent, force_terminal=True, width=columns, height=rows, color_system="standard", highlight=False
        )
        self.now = 0.0

    def reply(self) -> MarkdownWriter:
        return MarkdownWriter(self.console, clock=lambda: self.now)

    def lines(self) -> list[str]:
        """Everything, from the first line that scrolled off to the last that is not empty."""
        self.stream.feed(self.sent.getvalue())
        self.sent.seek(0)
        self.sent.truncate()
        rows = [*self.emulated.history.top, *(self.emulated.buffer[y] for y in range(self.emulated.lines))]
        texts = ["".join(row[x].data for x in range(self.emulated.columns)).rstrip() for row in rows]
        while texts and not texts[-1]:
            texts.pop()
        return texts


def shown(text: str, *, pieces: list[str] | None = None, rows: int = 20) -> list[str]:
    screen = Screen(rows)
    reply = screen.reply()
    for piece in pieces or [text]:
        screen.now += 1
        reply.write(piece)
        screen.lines()
    reply.end()
    return screen.lines()


def test_blocks_and_spaces_between_them() -> None:
    lines = shown(TEXT)
    at = {text: lines.index(text) for text in ("Second line.", "last words", "def f(x):")}
    assert lines[at["def f(x):"] : at["def f(x):"] + 4] == ["def f(x):", "    return x  # 10\u00b0", "", "print(f(1))"]
    assert lines[at["last words"] - 1] == ""
    assert lines[at["Second line."] - 1].endswith("the width of the screen.")
    assert not any(first == second == "" for first, second in itertools.pairwise(lines))


@pytest.mark.parametrize("seed", range(8))
def test_the_screen_does_not_depend_on_the_pieces(seed: int) -> None:
    generator = random.Random(seed)
    pieces, rest = [], TEXT
    while rest:
        n = generator.choice((1, 1, 2, 3, 7, 30))
        pieces.append(rest[:n])
        rest = rest[n:]
    assert shown(TEXT, pieces=pieces) == shown(TEXT)


LONG = {
    "code": (lambda n: "```\n" + "\n".join(f"line {i}" for i in range(n)) + "\n```", "line {}"),
    # Until it is closed, the highlighter sees no comment.
    "comment in code": (
        lambda n: "```html\n<!--\n" + "\n".join(f"line {i}" for i in range(n)) + "\n-->\n```",
        "line {}",
    ),
    "list": (lambda n: "\n".join(f"{i + 1}. item {i}" for i in range(n)), "item {}"),
    "table": (lambda n: "| a |\n|---|\n" + "\n".join(f"| {'x' * i} cell {i} |" for i in range(n)), "cell {}"),
    "paragraph": (lambda n: "**" + "\n".join(f"line {i}" for i in range(n)) + "**", "line {}"),
}


@pytest.mark.parametrize("rows", [4, 9])
@pytest.mark.parametrize("kind", LONG)
def test_block_longer_than_the_screen_is_there_once(kind: str, rows: int) -> None:
    make, line = LONG[kind]
    text = f"before\n\n{make(40)}\n\nafter"
    lines = shown(text, pieces=[text[i : i + 7] for i in range(0, len(text), 7)], rows=rows)
    assert (lines[0], lines[-1]) == ("before", "after")
    found = [i for i, shown_line in enumerate(lines) if re.search(line.format(r"\d+$"), shown_line)]
    assert [lines[i].split()[-1] for i in found] == [str(i) for i in range(40)]
    assert found == list(range(found[0], found[0] + 40))
    assert lines == shown(text)


def test_code_scrolls_away_while_it_is_open() -> None:
    screen = Screen(rows=5)
    reply = screen.reply()
    reply.write("```\n")
    for i in range(20):
        screen.now += 1
        reply.write(f"line {i}\n")
        screen.lines()
    assert screen.lines() == [f"line {i}" for i in range(20)]


@pytest.mark.parametrize("columns", [20, 120])
def test_code_longer_than_the_screen_survives_a_resize(columns: int) -> None:
    screen = Screen(rows=5)
    reply = screen.reply()
    code = [f"line {i} " + "word " * 8 for i in range(20)]
    reply.write("```\n" + "\n".join(code))
    screen.console.width = columns
    screen.now += 1
    reply.write("\nlast\n```")
    reply.end()
    again = "".join(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.sent.getvalue()).split())
    assert "".join(code).replace(" ", "") + "last" in again


def test_finished_blocks_are_not_sent_again() -> None:
    screen = Screen()
    reply = screen.reply()
    sent = []
    for piece in ["first block\n\n", "second block\n\n", "third", " block\n\n", "x"]:
        screen.now += 1
        reply.write(piece)
        sent.append(screen.sent.getvalue())
        screen.lines()
    assert "first block" in sent[0]
    assert not any("first block" in later for later in sent[2:])
    assert "second block" not in sent[4]


def test_open_block_is_drawn_before_it_ends() -> None:
    screen = Screen()
    reply = screen.reply()
    reply.write("half a sen")
    assert screen.lines() == ["half a sen"]
    reply.write("tence")  # at the same moment: not drawn yet
    assert screen.lines() == ["half a sen"]
    screen.now += 1
    reply.write(".")
    assert screen.lines() == ["half a sentence."]


def test_screen_that_gets_narrower_leaves_no_rest() -> None:
    screen = Screen()
    reply = screen.reply()
    reply.write("word " * 22)
    assert screen.lines() == ["word " * 11 + "word", "word " * 9 + "word"]
    # What a terminal does with both lines at 30 columns: four rows, the cursor in the last.
    screen.emulated.resize(columns=30)
    screen.emulated.reset()
    screen.emulated.set_mode(pyte.modes.LNM)
    screen.stream.feed("\n".join(["word word word word word word", "word word word word word word"] * 2))
    screen.console.width = 30
    screen.now += 1
    reply.write("end")
    assert " ".join(screen.lines()).split() == ["word"] * 22 + ["end"]


def test_no_spaces_at_the_ends_of_lines() -> None:
    screen = Screen()
    reply = screen.reply()
    reply.write(TEXT)
    reply.end()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.sent.getvalue())
    assert not re.search(r" $", plain, re.M)


def test_control_characters_are_taken_out() -> None:
    evil = "a\x1b]0;title\x07b\x9b2Jc\x7f\r\bd\te\nf"
    assert printable(evil) == "a]0;titleb2Jcd\te\nf"
    screen = Screen()
    reply = screen.reply()
    reply.write(evil + " &#27;[2J &#x9b;x `\x1b[31m`")
    reply.end()
    own = screen.sent.getvalue()
    assert "\x1b]" not in own and "\x9b" not in own and own.count("\x1b[2J") == 0
    raw = io.StringIO()
    PlainWriter(raw).write(evil)
    assert raw.getvalue() == printable(evil)


def test_text_that_is_no_markdown_stays() -> None:
    lines = shown("<think>why</think>\n\n<div>\n\n[1]: http://example.org\n\nsee [1] & <b>this</b>")
    assert lines == ["<think>why</think>", "", "<div>", "", "[1]: http://example.org", "", "see [1] & <b>this</b>"]


def test_link_shows_where_it_goes() -> None:
    assert shown("[safe](http://example.org/x)") == ["safe (http://example.org/x)"]


def test_raw_reply_ends_with_one_line_feed() -> None:
    for text in ("text", "text\n"):
        raw = io.StringIO()
        reply = PlainWriter(raw)
        reply.write(text)
        reply.end()
        assert raw.getvalue() == "text\n"


def test_empty_reply_shows_nothing() -> None:
    assert shown("") == shown("\n \n") == []
