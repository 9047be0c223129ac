"""GBNF, the grammars of llama.cpp, in Lark.

    root ::= "yes" | "no" answer{2,3}     # the rule `root` is the whole text
    answer ::= [a-z]+ [^"\\x00-\\x1F]* .

A rule ends at the next one, or at a line feed outside of parentheses that no `|` precedes or follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from luce.errors import LuceError
from luce.text.lark import text_rule
from luce.text.schema_limits import MAX_REPEATS, bounded_int

_RULE = re.compile(r"^[ \t]*([A-Za-z0-9_-]+)[ \t]*::=", re.MULTILINE)
_MOST_RULES = 10_000
_DEEPEST = 100
#: any character, line feeds included
_ANY = "/(?s:.)/"
_ELEMENTS = ("name", "text", "class", "any", "token", "open")


class GbnfError(LuceError):
    """A text that is no GBNF, or GBNF that has no translation; the message begins with the line."""


def is_gbnf(text: str) -> bool:
    """Whether a grammar is GBNF rather than Lark."""
    return _RULE.search(text) is not None


class _Word(NamedTuple):
    """A token of GBNF."""

    #: a group of _WORDS, or end
    kind: str
    text: str
    line: int


_WORDS = re.compile(
    r"""(?P<skip>[ \t\r]+|\#[^\n]*)
    |(?P<line>\n)
    |(?P<define>::=)
    |(?P<name>[A-Za-z0-9_-]+)
    |(?P<text>"(?:[^"\\\n]|\\.)*")
    |(?P<class>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<repeat>[*+?]|\{[ ]*[0-9]+[ ]*(?:,[ ]*[0-9]*[ ]*)?\})
    |(?P<token>!?<[^>\n]*>)
    |(?P<any>\.)
    |(?P<open>\()
    |(?P<close>\))
    |(?P<or>\|)""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]"}
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)


def lark_of_gbnf(text: str) -> str:
    """The grammar in llguidance's Lark, whose rule `start` is GBNF's `root`. Raises GbnfError."""
    return _Translation(list(_words(text))).lark()


def _words(text: str) -> Iterator[_Word]:
    at, line = 0, 1
    while at < len(text):
        found = _WORDS.match(text, at)
        if found is None:
            raise _error(line, f"unexpected {text[at : at + 20].partition(chr(10))[0]!r}")
        kind = str(found.lastgroup)
        if kind != "skip":
            yield _Word(kind, found[0], line)
        line += kind == "line"
        at = found.end()
    yield _Word("end", "", line)


def _error(line: int, reason: str) -> GbnfError:
    return GbnfError(f"line {line}: {reason}")


class _Translation:
    def __init__(self, words: list[_Word]) -> None:
        self._words = words
        self._at = 0
        self._names: dict[str, str] = {}
        #: of each name: the line that uses it first
        self._used: dict[str, int] = {}

    def lark(self) -> str:
        """All rules."""
        rules: dict[str, str] = {}
        while self._skip_lines().kind != "end":
            name = self._take("name", "the name of a rule")
            self._take("define", "::=")
            if name.text in rules:
                raise _error(name.line, f"the rule {name.text[:40]!r} is defined twice")
            if len(rules) == _MOST_RULES:
                raise _error(name.line, f"expected at most {_MOST_RULES:,} rules")
            rules[name.text] = self._alternatives(depth=0)
        if "root" not in rules:
            raise _error(self._words[-1].line, "there is no rule 'root'")
        for used, line in self._used.items():
            if used not in rules:
                raise _error(line, f"there is no rule {used[:40]!r}")
        return "".join(f"{self._name(name)}: {rule}\n" for name, rule in rules.items())

    # --- words

    def _peek(self) -> _Word:
        return self._words[self._at]

    def _next(self) -> _Word:
        word = self._words[self._at]
        self._at += word.kind != "end"
        return word

    def _take(self, kind: str, what: str) -> _Word:
        word = self._next()
        if word.kind != kind:
            got = word.text.strip()[:20]
            raise _error(word.line, f"expected {what}" + (f", got {got!r}" if got else ""))
        return word

    def _skip_lines(self) -> _Word:
        while self._peek().kind == "line":
            self._at += 1
        return self._peek()

    # --- rules

    def _alternatives(self, depth: int) -> str:
        if depth > _DEEPEST:
            raise _error(self._peek().line, f"expected at most {_DEEPEST} groups inside each other")
        found = [self._sequence(depth)]
        while self._continues(depth):
            found.append(self._sequence(depth))
        return " | ".join(found)

    def _continues(self, depth: int) -> bool:
        """Take the `|` before a further alternative; it may stand at the beginning of a line."""
        begin = self._at
        if self._skip_lines().kind != "or":
            # A line feed ends a rule, but not a group.
            self._at = self._at if depth else begin
            return False
        self._next()
        return True

    def _sequence(self, depth: int) -> str:
        self._skip_lines_before_sequence()
        found = []
        while True:
            if depth:
                self._skip_lines()
            word = self._peek()
            if word.kind not in _ELEMENTS:
                break
            found.append(self._repeated(self._element(depth)))
        if not depth and self._peek().kind not in ("line", "or", "end"):
            raise _error(self._peek().line, f"unexpected {self._peek().text[:20]!r}")
        return " ".join(found) or '""'

    def _skip_lines_before_sequence(self) -> None:
        """Skip the line feeds behind `::=` and `|`, unless the next rule follows."""
        begin = self._at
        self._skip_lines()
        if self._peek().kind == "name" and self._words[self._at + 1].kind == "define":
            self._at = begin

    def _element(self, depth: int) -> str:
        word = self._next()
        if word.kind == "name":
            self._used.setdefault(word.text, word.line)
            return self._name(word.text)
        if word.kind == "text":
            # A terminal of several characters would be matched greedily: "ab" "cd" | "abc" would refuse abcd.
            parts = [text_rule(char) for char in _unescaped(word)]
            return f"({' '.join(parts)})" if len(parts) > 1 else "".join(parts) or '""'
        if word.kind == "class":
            return _class(word)
        if word.kind == "any":
            return _ANY
        if word.kind == "token":
            if word.text.startswith("!"):
                raise _error(word.line, f"{word.text[:40]}: all tokens but one have no translation")
            return word.text
        inner = self._alternatives(depth + 1)
        if self._skip_lines().kind != "close":
            raise _error(word.line, "this group is not closed")
        self._next()
        return f"({inner})"

    def _repeated(self, element: str) -> str:
        while self._peek().kind == "repeat":
            word = self._next()
            text = word.text.replace(" ", "")
            bounds = [bounded_int(bound, MAX_REPEATS) for bound in re.findall("[0-9]+", text)]
            if any(bound > MAX_REPEATS for bound in bounds):
                raise _error(word.line, f"{text[:40]} repeats more than {MAX_REPEATS:,} times")
            if len(bounds) == 2 and bounds[0] > bounds[1]:
                raise _error(word.line, f"{text}: the first number is the larger one")
            # Lark takes one repetition of an element.
            element = f"({element}){text}" if element[-1] in "*+?}" else element + text
        return element

    def _name(self, name: str) -> str:
        """Lark's name of a rule: lower case, since upper case is for terminals."""
        if name == "root":
            return "start"
        if name not in self._names:
            self._names[name] = f"r{len(self._names)}_{re.sub('[^a-z0-9_]', '_', name.lower())}"
        return self._names[name]


def _unescaped(word: _Word) -> str:
    """The characters of a text, without its quotation marks."""

    def character(found: re.Match[str]) -> str:
        code = found[1] or found[2] or found[3]
        if code is not None:
            if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000:
                raise _error(word.line, f"{found[0]} is no character")
            return chr(int(code, 16))
        if found[4] not in _ESCAPES:
            raise _error(word.line, f"unknown escape {found[0]!r}")
        return _ESCAPES[found[4]]

    return _ESCAPE.sub(character, word.text[1:-1])


def _class(word: _Word) -> str:
    """One character of a class, as a regular expression."""
    inner = word.text[1:-1]
    negated = inner.startswith("^")
    # The escaped characters first: a hyphen among them is no range.
    parts = re.findall(r"\\(?:x..|u....|U........|.)|[^\\]", inner[negated:], re.DOTALL)
    chars = [_unescaped(_Word("text", f"'{part}'", word.line)) for part in parts]
    found, at = [], 0
    while at < len(chars):
        if at + 2 < len(chars) and parts[at + 1] == "-":
            if chars[at] > chars[at + 2]:
                raise _error(word.line, f"{word.text[:40]}: a range from the larger to the smaller character")
            found.append(f"{_code(chars[at])}-{_code(chars[at + 2])}")
            at += 3
        else:
            found.append(_code(chars[at]))
            at += 1
    if not found:
        if negated:
            return _ANY
        raise _error(word.line, "[] matches no character")
    return f"/[{'^' * negated}{''.join(found)}]/"


def _code(char: str) -> str:
    return f"\\u{{{ord(char):x}}}"
