"""Pieces of grammars in llguidance's Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

#: White space at one place in JSON. Without a limit, a model whose favourites are masked writes blanks to the end.
SPACE = r"[ ]|\n[ ]{0,40}"
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: what models write between the reasoning's end and the text behind it
BLANK = r"/[ \n]{0,4}/ "
#: items in any order: the library has so many bits
_MOST_FREE = 64
#: a text in pieces: special tokens with their text, and (None, text) between them
Cut = Callable[[str], Iterator[tuple[int | None, str]]]
#: any character
ANY = r"(.|\n)"
_ANY_TEXT = f"/{ANY}*/"


def text_rule(text: str) -> str:
    """A text."""
    # llguidance's lexer takes no raw DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def json_rule(schema: Mapping[str, Any], *, compact: bool = False) -> str:
    """JSON by a plain schema. `compact`: with one space behind each comma and colon, and no other white space."""
    return "%json " + json.dumps({**schema, "x-guidance": _COMPACT if compact else {"whitespace_pattern": SPACE}})


def pattern_of(text: str) -> str:
    """A regular expression, without slashes, that matches a text."""
    return "".join(char if char.isalnum() and char.isascii() else f"\\u{{{ord(char):x}}}" for char in text)


class Rules:
    """The rules of a grammar while it is put together. `cut` divides a text into special tokens and other text;
    `compact` as in json_rule."""

    def __init__(self, cut: Cut, *, compact: bool = False) -> None:
        self._cut = cut
        self._compact = compact
        #: texts that may end a free text of the grammar
        self.markers: set[str] = set()
        #: whether each text that ends with a marker is free: any text up to it
        self.only_free = True
        self._lines: list[str] = []
        self._names: dict[str, str] = {}

    def text(self, start: str) -> str:
        """The whole grammar; `start`: the body of its first rule."""
        return "\n".join([f"start: {start}", *self._lines, ""])

    def literal(self, text: str) -> str:
        """A text of a dialect: special tokens of the vocabulary are themselves, all else is bytes."""
        pieces = (f"<[{token}]>" if token is not None else text_rule(part) for token, part in self._cut(text))
        return " ".join(pieces) or '""'

    def rule(self, body: str, attribute: str = "") -> str:
        """The name of a rule; equal ones share it."""
        key = f"{attribute}: {body}"
        if key not in self._names:
            self._names[key] = f"r{len(self._lines)}"
            self._lines.append(self._names[key] + key)
        return self._names[key]

    def space(self, *, gap: bool = False) -> str:
        """White space between two tokens of JSON; `gap`: behind a comma or a colon."""
        if self._compact:
            return '" "' if gap else '""'
        return f"({self.terminal(f'/{SPACE}/')})?"

    def json(self, schema: Mapping[str, Any]) -> str:
        """The name of a rule for JSON by a plain schema."""
        return self.rule(json_rule(schema, compact=self._compact))

    def reserve(self) -> str:
        """The name of a rule that `define` gets a body for; the body may hold the name."""
        self._lines.append("")
        return f"r{len(self._lines) - 1}"

    def define(self, name: str, body: str) -> None:
        """Give a reserved rule its body."""
        self._lines[int(name[1:])] = f"{name}: {body}"

    def terminal(self, body: str) -> str:
        """The name of a terminal."""
        key = f"T: {body}"
        if key not in self._names:
            self._names[key] = f"T{len(self._lines)}"
            self._lines.append(f"{self._names[key]}: {body}")
        return self._names[key]

    def until(self, end: str, content: str = _ANY_TEXT) -> str:
        """Text, by a terminal's body, up to a text of a dialect, which is part of the rule."""
        pieces = list(self._cut(end))
        self.only_free &= content == _ANY_TEXT
        if all(token is None for token, _ in pieces):
            self.markers.add(end)
            return self.rule(self.terminal(f"({content}) {text_rule(end)}"), "[lazy]")
        before = pieces[0][1] if pieces[0][0] is None else ""
        self.markers |= {before} - {""}
        # A special token cannot be text, so it ends the text before it.
        value = self.terminal(f"({content}) {text_rule(before)}" if before else content)
        rest = self.literal(end[len(before) :])
        return self.rule(f"{value} {rest}")

    def any_order(self, items: Sequence[str], required: int, between: str = "") -> str:
        """Items in any order, each at most once; the first `required` ones must come. More than 64: in this order."""
        if len(items) > _MOST_FREE:
            return self._in_order(items, required, between)
        if not items:
            return '""'
        rest = self.reserve()
        done = f'"" %if is_ones([0:{required}])' if required else '""'
        lead = f"{between} " if between else ""
        arms = [f"{lead}{item} {rest}::set_bit({i}) %if bit_clear({i})" for i, item in enumerate(items)]
        self._lines[int(rest[1:])] = f"{rest}::_: " + "\n | ".join([done, *arms])
        if not between:
            return f"{rest}::0x0"
        first = self.rule("\n | ".join(f"{item} {rest}::0x{1 << i:x}" for i, item in enumerate(items)))
        return first if required else f"({first})?"

    def _in_order(self, items: Sequence[str], required: int, between: str) -> str:
        """Items in their order: those that must come, then any of the others."""
        if not between:
            return " ".join([*items[:required], *(f"({item})?" for item in items[required:])])
        first = f" {between} ".join(items[:required])
        others = [f"({between} {item})?" for item in items[required:]]
        if first:
            return " ".join([first, *others])
        # Behind the first of them that comes, each has its separator in front.
        arms = [" ".join([items[i], *others[i + 1 :]]) for i in range(len(items))]
        return "(" + " | ".join(arms) + ")?"
