"""Reads the arguments of a call in dialects that do not write them as JSON, and writes them as JSON piece by piece."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from luce.models.calls import Bare, Calls, Tagged
from luce.text.call_cursor import Cursor, MalformedCallError, Reads, coming
from luce.text.json_reader import json_text
from luce.text.marks import Marks, quoted
from luce.text.parameter_types import Parameter, ParameterOf, Schema, decides_early, names_in, typed
from luce.text.reasoning import overlap

# Names of parameters are longer nowhere; a text without the marker behind it would be held back for ever.
_LONGEST_KEY = 256
_DEPTH = 100
# In place of an offset: there is no end here, or further text must tell.
_TEXT, _UNKNOWN = -1, -2
_SPACE = re.compile(r"\s*")
_BRACKETS = {"{": "}", "[": "]", "(": ")"}


class ArgumentsWriter:
    """Writes a JSON object to `out`; `finish` makes what was written whole at any time."""

    def __init__(self, out: Callable[[str], None]) -> None:
        self._out = out
        self._open: list[str] = []
        # What goes out with the next value: brackets, and the comma and the key before it.
        self._brackets = ""
        self._key = ""
        self._comma = False
        self._in_string = False

    def open(self, bracket: Literal["{", "["]) -> None:
        """Begin an object or a list."""
        self._before()
        self._brackets += self._key + bracket
        self._key = ""
        self._open.append(_BRACKETS[bracket])
        self._comma = False

    def key(self, name: str) -> None:
        """Begin a member of an object."""
        self._before()
        self._key += f'"{quoted(name)}": '
        self._comma = False

    def value(self, text: str) -> None:
        """A whole value, as JSON."""
        self._before()
        self._give(text)

    def begin_string(self) -> None:
        """Begin a string."""
        self._before()
        self._give('"')
        self._in_string = True

    def string(self, text: str) -> None:
        """A piece of the string, as it is."""
        if text:
            self._give(quoted(text))

    def end_string(self) -> None:
        """End the string."""
        self._give('"')
        self._in_string = False

    def close(self) -> None:
        """End the innermost object or list."""
        self._give(self._open.pop())
        self._comma = True

    def finish(self) -> None:
        """End everything that is open."""
        if self._in_string:
            self.end_string()
        self._key = ""
        while self._open:
            self.close()

    def _before(self) -> None:
        if self._comma:
            self._key += ", "
        self._comma = True

    def _give(self, text: str) -> None:
        self._out(self._brackets + self._key + text)
        self._brackets = self._key = ""


class TaggedReader:
    """Reads parameters that stand between tags. `parameter_of`: a parameter, by the schema of all."""

    def __init__(
        self, cursor: Cursor, calls: Calls, marks: Marks, writer: ArgumentsWriter, parameter_of: ParameterOf
    ) -> None:
        assert isinstance(calls.arguments, Tagged)
        self._cursor = cursor
        self._marks = marks
        self._writer = writer
        self._parameter_of = parameter_of
        self._tags = calls.arguments
        text = self._tags.key[1] + self._tags.value[0]
        #: a line feed in front of a value, and one behind it, belong to the format
        self._feed = text.endswith("\n"), self._tags.value[1].startswith("\n")
        self._end = self._tags.value[1].strip()
        #: the words that end the call; they end a value too whose tag is missing
        self._closing = calls.call[1].split()
        #: what may follow the tag that ends a value; the tag alone is text, unless it is a token
        self._following = (self._tags.key[0].split()[0], *self._closing)
        #: what may follow a call
        nexts = (calls.trigger, *calls.call[0].split()[:1], *calls.section[1].split()[:1])
        self._behind_call = tuple(dict.fromkeys(nexts))
        self._tails = tuple(dict.fromkeys((self._end, *self._closing)))
        self._ends = re.compile("|".join(map(re.escape, self._tails)))

    def read(self, schema: Schema | None) -> Reads[None]:
        """All parameters."""
        cursor, tags, close = self._cursor, self._tags, self._tags.key[1].strip()
        odd = [name + close for name in names_in(schema) if not self._is_plain(name)]
        self._writer.open("{")
        while (yield from cursor.accept(tags.key[0])):
            if known := (yield from cursor.one_of(odd)):
                name = known.removesuffix(close)
                cursor.at -= len(close)
            else:
                key = yield from cursor.until([close], lambda have: len(have) <= _LONGEST_KEY)
                name = self._marks.spelled(key)
            yield from cursor.expect(tags.key[1])
            parameter = self._parameter_of(schema, name)
            if tags.typed is not None:
                is_string = yield from self._is_string(tags.typed)
                parameter = Parameter(frozenset({"string" if is_string else "json"}))
            yield from cursor.expect(tags.value[0])
            self._writer.key(name)
            yield from self._value(parameter)
        self._writer.close()

    def _is_plain(self, name: str) -> bool:
        """Whether a name is read where the tag's end comes next."""
        return name == name.strip() and len(name) <= _LONGEST_KEY and self._tags.key[1].strip() not in name

    def _is_string(self, attribute: str) -> Reads[bool]:
        if (yield from self._cursor.accept(attribute.replace("%s", "true"))):
            return True
        yield from self._cursor.expect(attribute.replace("%s", "false"))
        return False

    def _value(self, parameter: Parameter) -> Reads[None]:
        cursor, writer, spelled = self._cursor, self._writer, self._marks.spelled
        while cursor.at == len(cursor.text):
            yield from cursor.more()
        if self._feed[0] and cursor.text[cursor.at] == "\n":
            cursor.at += 1
            while cursor.at == len(cursor.text):
                yield from cursor.more()
        if not decides_early(parameter.types, cursor.text[cursor.at]):
            while True:
                end, after = self._find_end()
                if after != _UNKNOWN:
                    break
                yield from cursor.more()
            writer.value(typed(spelled(cursor.text[cursor.at : end]), parameter))
            cursor.at = after
            cursor.commit()
            return
        writer.begin_string()
        while True:
            end, after = self._find_end()
            writer.string(spelled(cursor.text[cursor.at : end]))
            cursor.at = end if after == _UNKNOWN else after
            cursor.commit()
            if after != _UNKNOWN:
                break
            yield from cursor.more()
        writer.end_string()

    def _find_end(self) -> tuple[int, int]:
        """Where the value ends, and where the text behind it begins; _UNKNOWN for that: the value goes on at least up
        to there."""
        text, begin = self._cursor.text, self._cursor.at
        for found in self._ends.finditer(text, begin):
            after = self._after(found[0], found.start(), found.end())
            if after != _TEXT:
                return self._without_feed(found.start()), after
        if self._cursor.ended:
            return len(text), _UNKNOWN
        held = max(overlap(text[begin:], end) for end in self._tails)
        return self._without_feed(len(text) - held), _UNKNOWN

    def _after(self, end: str, start: int, at: int) -> int:
        """Where the text behind an end of the value begins, _TEXT if it is none, _UNKNOWN if further text must tell."""
        text = self._cursor.text
        if end == self._end and self._marks.is_mark(end):
            return at
        if end == self._end:
            behind = _skip(text, at)
            # Models write the tag twice.
            while text.startswith(end, behind):
                at = behind + len(end)
                behind = _skip(text, at)
            return self._followed(text[behind:], (*self._following, end), at)
        # The call ends without the tag of its last value.
        rest = text[_skip(text, at) :]
        return self._followed(rest, self._closing[1:] if end != self._closing[-1] else self._behind_call, start)

    def _followed(self, rest: str, following: Sequence[str], found: int) -> int:
        """`found` if one of these texts comes next, or nothing."""
        if any(rest.startswith(word) for word in following):
            return found
        if any(word.startswith(rest) for word in following):
            return found if self._cursor.ended else _UNKNOWN
        return _TEXT

    def _without_feed(self, end: int) -> int:
        text = self._cursor.text
        return end - 1 if self._feed[1] and end > self._cursor.at and text[end - 1] == "\n" else end


class BareReader:
    """Reads an object with bare keys, whose strings stand between tokens. `schema`: that of the arguments."""

    def __init__(
        self, cursor: Cursor, calls: Calls, marks: Marks, writer: ArgumentsWriter, schema: Schema | None
    ) -> None:
        assert isinstance(calls.arguments, Bare)
        self._cursor = cursor
        self._marks = marks
        self._writer = writer
        self._quote = calls.arguments.quote
        self._close = calls.call[1]
        quote = re.escape(self._quote)
        #: a key with what follows it, or what may become one
        self._key = re.compile(rf"(?:{quote}|\")?([^\s:=,{{}}\[\]\"]+?)(?:{quote}|\")?\s*[:=]")
        self._key_begun = re.compile(rf"(?:{quote}|\")?[^\s:=,{{}}\[\]]{{0,{_LONGEST_KEY}}}\s*")
        plain = re.compile(rf"[^\s:=,{{}}\[\]\"]{{1,{_LONGEST_KEY}}}")
        #: the keys of the schema, with what follows them, that are not told from other text without it
        self._odd_keys = [f"{name}:" for name in names_in(schema) if not plain.fullmatch(name)]
        self._value_begins = re.compile(rf"{quote}|[-0-9tfnTFN\[{{\"]")
        self._scalar_ends = re.compile(rf"[,}}\])]|{quote}|{re.escape(self._close)}")

    def read(self, depth: int = 0) -> Reads[None]:
        """The object. Models write it with round brackets too."""
        cursor = self._cursor
        bracket = yield from cursor.peek()
        if bracket not in "{(" or depth > _DEPTH:
            raise MalformedCallError
        cursor.at += 1
        self._writer.open("{")
        while not (yield from self._ends(_BRACKETS[bracket])):
            self._writer.key((yield from self._name()))
            yield from self._value(depth, in_list=False)
            if not (yield from cursor.accept(",")):
                break
        yield from cursor.expect(_BRACKETS[bracket])
        self._writer.close()

    def _list(self, depth: int) -> Reads[None]:
        cursor = self._cursor
        if depth > _DEPTH:
            raise MalformedCallError
        cursor.at += 1
        self._writer.open("[")
        while (yield from cursor.peek()) != "]":
            yield from self._value(depth, in_list=True)
            if not (yield from cursor.accept(",")):
                break
        yield from cursor.expect("]")
        self._writer.close()

    def _ends(self, bracket: str) -> Reads[bool]:
        """Whether the object ends here."""
        cursor = self._cursor
        while (end := self._odd_key_at(cursor.at)[0]) == _UNKNOWN and not cursor.ended:
            yield
        begin = cursor.at
        if end < 0 and (yield from cursor.peek()) == bracket:
            return True
        cursor.at = begin
        return False

    def _name(self) -> Reads[str]:
        cursor = self._cursor
        while True:
            end, name = self._key_at(cursor.at)
            if end == _TEXT:
                raise MalformedCallError
            if end != _UNKNOWN:
                cursor.at = end
                return name
            yield from cursor.more()

    def _key_at(self, at: int) -> tuple[int, str]:
        """Where the text behind a key and its colon ends, and the key; _TEXT for that if no key stands here, _UNKNOWN
        if further text must tell."""
        end, name = self._odd_key_at(at)
        if end >= 0 or (end == _UNKNOWN and not self._cursor.ended):
            return end, name
        text, at = self._cursor.text, _skip(self._cursor.text, at)
        if found := self._key.match(text, at):
            return found.end(), self._marks.spelled(found[1])
        return _UNKNOWN if end == _UNKNOWN or self._key_begun.fullmatch(text, at) else _TEXT, ""

    def _odd_key_at(self, at: int) -> tuple[int, str]:
        """As _key_at, of the keys that only the schema tells. They may begin with white space, or as an object ends."""
        text = self._cursor.text
        for begin in dict.fromkeys((at, _skip(text, at))):
            found = coming(text, begin, self._odd_keys)
            if found:
                return begin + len(found), found[:-1]
            if found is None:
                return _UNKNOWN, ""
        return _TEXT, ""

    def _value(self, depth: int, *, in_list: bool) -> Reads[None]:
        cursor = self._cursor
        first = yield from cursor.peek()
        if first == "{":
            yield from self.read(depth + 1)
        elif first == "[":
            yield from self._list(depth + 1)
        elif (yield from cursor.accept(self._quote)):
            yield from self._string(in_list)
        else:
            yield from self._scalar(in_list)
        cursor.commit()

    def _string(self, in_list: bool) -> Reads[None]:
        cursor, writer, spelled, quote = self._cursor, self._writer, self._marks.spelled, self._quote
        writer.begin_string()
        while True:
            text = cursor.text
            end = text.find(quote, cursor.at)
            unclosed = text.find(self._close, cursor.at, len(text) if end < 0 else end)
            after = _UNKNOWN if end < 0 else self._after(end + len(quote), in_list)
            if end < 0:
                end = len(text) - (0 if cursor.ended else overlap(text[cursor.at :], quote))
            if unclosed >= 0 and self._marks.is_mark(self._close):
                end = unclosed
            writer.string(spelled(text[cursor.at : end]))
            cursor.at = end
            cursor.commit()
            if end == unclosed:
                raise MalformedCallError
            if after == _UNKNOWN:
                yield from cursor.more()
                continue
            cursor.at += len(quote)
            if after != _TEXT:
                break
            # The model's quotation mark inside a text.
            writer.string('"')
        writer.end_string()

    def _after(self, at: int, in_list: bool) -> int:
        """`at` if what stands there may follow a string, else _TEXT; _UNKNOWN if further text must tell."""
        text, ended = self._cursor.text, self._cursor.ended
        at = behind = _skip(text, at)
        if behind == len(text):
            return at if ended else _UNKNOWN
        if text[behind] in "}])" or text.startswith(self._close, behind):
            return at
        if text[behind] != ",":
            return _TEXT
        comma, behind = behind, _skip(text, behind + 1)
        if behind == len(text):
            return at if ended else _UNKNOWN
        if in_list:
            return at if self._value_begins.match(text, behind) else _TEXT
        end, _ = self._key_at(comma + 1)
        if end == _UNKNOWN:
            return _TEXT if ended else _UNKNOWN
        return _TEXT if end == _TEXT else at

    def _scalar(self, in_list: bool) -> Reads[None]:
        """A number or a literal, or a string without its first quote."""
        cursor = self._cursor
        while not (found := self._scalar_ends.search(cursor.text, cursor.at)):
            yield from cursor.more()
        text = cursor.text[cursor.at : found.start()].strip()
        value = json_text(text)
        if found[0] != self._quote and value is not None:
            self._writer.value(value)
            cursor.at = found.start()
        else:
            yield from self._string(in_list)


def _skip(text: str, at: int) -> int:
    """The offset behind white space."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
