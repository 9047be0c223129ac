"""Finds the calls of tools in the text of a reply, in the dialect of the model, while the reply is generated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from luce.models.calls import Bare, Calls, Json, Keywords, Tagged
from luce.text.call_arguments import ArgumentsWriter, BareReader, TaggedReader
from luce.text.call_cursor import Cursor, EndOfReplyError, MalformedCallError, Reads
from luce.text.json_reader import json_text, string_of
from luce.text.keyword_reader import KeywordReader
from luce.text.marks import Marks
from luce.text.parameter_types import ParameterOf, Schema, parameter_of
from luce.text.reasoning import overlap
from luce.text.reply_parser import CallArguments, CallEnded, CallStarted, Part, TextPart

# Names that fit when the tools are unknown.
_LONGEST_ID = 128
# Between a name and what must follow it.
_LONGEST_BESIDE = 128
_NAME = re.compile(r"[\w.:/-]{0,128}")
#: keys of the arguments in dialects that write a call as one object; models mix them up
_ARGUMENTS = ("arguments", "parameters")
#: further keys that models write before the name
_BESIDE = ("id", "type")


class Stretch(NamedTuple):
    """Where whole calls stand in a marked text: from the trigger to the close of the last one, or of the section."""

    begin: int
    end: int
    #: the numbers of its calls
    calls: range
    #: the end is that of the section around all calls
    section: bool


@dataclass(frozen=True)
class CallableTools:
    """The tools that a reply may call."""

    #: the schema of the parameters of each, by the tool's name
    schemas: Mapping[str, Schema | None]
    #: the reply ends behind its first call
    single: bool = False


class CallParser:
    """Divides marked text into text and calls. The parts, each kind joined, do not depend on where the text was cut.

    A call begins at the trigger of the dialect, if a tool's name follows as the dialect writes it: the call starts as
    soon as its name is whole, and its arguments come piece by piece. What is no call comes as text, all of it. A call
    that has started and goes wrong ends with valid JSON, and what is left of it is text.

    `tools`: the schema of the parameters of each tool, by name; None: every name is a tool's. `parameter_of`: a
    parameter between tags, by the schema of all.
    """

    def __init__(
        self, marks: Marks, tools: Mapping[str, Schema | None] | None, parameter_of: ParameterOf = parameter_of
    ) -> None:
        self._marks = marks
        self._tools = tools
        self._parameter_of = parameter_of
        self._variants: dict[str, list[Calls]] = {}
        for calls in (marks.calls, *marks.calls.accepts):
            self._variants.setdefault(calls.trigger, []).append(calls)
        #: the trigger that must come first, if there is one, and the others
        self._at_start = next((text for text, (calls, *_) in self._variants.items() if calls.at_start), "")
        self._anywhere = [text for text in self._variants if text != self._at_start]
        self._cursor = Cursor()
        self._parts: list[Part] = []
        #: calls that have started
        self.calls = 0
        #: calls that came as text, and calls that ended before they were whole
        self.bad_calls = self.cut_calls = 0
        #: the stretches of whole calls, each of one trigger behind the shorter ones that begin it
        self.stretches: list[Stretch] = []
        #: offset of the trigger that is read, and the number of the first call behind it
        self._section_begin = (0, 0)
        # The call that is read has started; arguments of it went out; what makes them whole when the call is cut.
        self._started = self._whole = False
        self._finish: Callable[[], None] = self._give_empty
        # Only white space has come since the reply or the last call: a trigger that must come first may follow.
        self._fresh = True
        # White space behind a call, which is text if text follows.
        self._gap = ""
        self._reader = self._reply()
        self._resume()

    def spelled(self, text: str) -> str:
        """Marked text as clients see it."""
        return self._marks.spelled(text)

    def push(self, text: str) -> list[Part]:
        """The parts that are final with more text."""
        if text:
            self._cursor.text += text
            self._resume()
        return self._taken()

    def flush(self) -> list[Part]:
        """The last parts, at the end of the reply."""
        self._cursor.ended = True
        self._resume()
        return self._taken()

    def _resume(self) -> None:
        next(self._reader, None)

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # --- text

    def _reply(self) -> Reads[None]:
        try:
            while True:
                trigger, at = yield from self._until_trigger()
                yield from self._section(trigger, at)
        except EndOfReplyError:
            return

    def _until_trigger(self) -> Reads[tuple[str, int]]:
        """Give out the text up to a trigger, and return it with its offset. The text's end that belongs to the call is
        not given out yet, nor passed over."""
        cursor = self._cursor
        first = yield from self._first()
        while not first:
            text = cursor.text
            found = [(at, trigger) for trigger in self._anywhere if (at := text.find(trigger, cursor.at)) >= 0]
            end, trigger = min(found, default=(len(text), ""))
            self._say(text[cursor.at : end - self._held(text[cursor.at : end], whole=bool(found))])
            cursor.at = end - self._held(text[cursor.at : end], whole=bool(found))
            cursor.commit()
            if found:
                return trigger, cursor.text.find(trigger)
            yield from cursor.more()
        return first, cursor.text.find(first, cursor.at)

    def _first(self) -> Reads[str]:
        """A trigger that must come first, if it does."""
        cursor = self._cursor
        between = self._marks.calls.between.strip()
        while self._at_start and self._fresh:
            text = cursor.text[cursor.at :].lstrip()
            after = text.removeprefix(between).lstrip() if self.calls else text
            if (not self.calls or text.startswith(between)) and after.startswith(self._at_start):
                return self._at_start
            begun = self._at_start.startswith(after) or (self.calls and between.startswith(text))
            if not begun or cursor.ended:
                break
            yield
        return ""

    def _held(self, text: str, *, whole: bool) -> int:
        """Characters at the end of a text that belong to a call behind it, or may belong to one."""
        if self._cursor.ended and not whole:
            return 0
        begun = [0] if whole else [overlap(text, trigger) for trigger in self._anywhere]
        return max((n + self._led(text[: len(text) - n]) for n in begun), default=0)

    def _led(self, text: str) -> int:
        lead = self._marks.calls.lead
        return next((n for n in range(len(lead), 0, -1) if text.endswith(lead[:n])), 0)

    def _say(self, text: str) -> None:
        """Give out text. White space behind a call waits for more of it."""
        if not text:
            return
        self._fresh = self._fresh and not text.strip()
        if self.calls and self._fresh:
            self._gap += text
            return
        self._parts.append(TextPart(self._marks.spelled(self._gap + text)))
        self._gap = ""

    # --- calls

    def _section(self, trigger: str, at: int) -> Reads[None]:
        """The calls behind a trigger, in the dialect that reads them; if none does, the trigger is text."""
        cursor = self._cursor
        begin = cursor.at
        self._section_begin = (cursor.dropped + at, self.calls)
        for calls in self._variants[trigger]:
            cursor.at = at
            try:
                yield from cursor.expect(calls.section[0])
                if not (calls.section[1] and (yield from cursor.accept(calls.section[1]))):
                    yield from self._call(calls)
            except (MalformedCallError, EndOfReplyError) as problem:
                if self._started:
                    self._end_cut(problem)
                    return
            else:
                while calls.section[1] and (yield from self._goes_on(calls)):
                    pass
                return
        self.bad_calls += 1
        cursor.at = at + len(trigger)
        self._say(cursor.text[begin : cursor.at])
        cursor.commit()

    def _goes_on(self, calls: Calls) -> Reads[bool]:
        """A further call of the section; False if the section ends, or what comes next is no call."""
        cursor = self._cursor
        try:
            if (yield from cursor.accept(calls.section[1])):
                cursor.commit()
                self._add_stretch(section=True)
                return False
            begin = cursor.at
            if calls.between.strip():
                yield from cursor.expect(calls.between)
            yield from self._call(calls)
        except (MalformedCallError, EndOfReplyError) as problem:
            if self._started:
                self._end_cut(problem)
            elif isinstance(problem, MalformedCallError):
                self.bad_calls += 1
                cursor.at = begin
            else:
                cursor.at = len(cursor.text)
            return False
        return True

    def _call(self, calls: Calls) -> Reads[None]:
        cursor = self._cursor
        yield from cursor.expect(calls.call[0])
        if isinstance(calls.arguments, Json) and calls.arguments.fields is not None:
            yield from self._object(calls.arguments, calls.arguments.fields)
        else:
            yield from self._named(calls)
        # The arguments are whole, so the call stands, also without its end.
        words = calls.call[1].split()
        closed = whole = not words
        try:
            for first in range(len(words)):
                closed = closed or (yield from cursor.accept(" ".join(words[first:])))
                whole = whole or (closed and not first)
        except EndOfReplyError:
            cursor.at, closed = len(cursor.text), True
        if not closed and isinstance(calls.arguments, Tagged):
            raise MalformedCallError
        self._end()
        if whole:
            self._add_stretch(section=False)

    def _named(self, calls: Calls) -> Reads[None]:
        """A call whose name stands outside of its arguments."""
        cursor, arguments = self._cursor, calls.arguments
        yield from cursor.expect(calls.name[0])
        opens = arguments.key[0].split()[0] if isinstance(arguments, Tagged) else "{"
        behind = calls.name[1].strip() or (calls.id[0] if calls.id is not None else "")
        brackets = ("(",) if isinstance(arguments, Bare) else ()
        stops = [behind] if behind else [opens, *brackets, *calls.call[1].split()[:1], "\n"]
        name = yield from cursor.until([*stops, *calls.name_ends], self._may_be_name)
        self._check(name)
        if calls.name_ends:
            yield from cursor.until(stops, lambda have: len(have) <= _LONGEST_BESIDE)
        yield from cursor.expect(calls.name[1])
        id = None
        if calls.id is not None:
            yield from cursor.expect(calls.id[0])
            id = yield from cursor.until([calls.id[1]], lambda have: len(have) <= _LONGEST_ID)
            yield from cursor.expect(calls.id[1])
        self._start(name, id)
        if isinstance(arguments, Json):
            yield from self._json_arguments()
            return
        if isinstance(arguments, Keywords):
            self._finish = lambda: None
            yield from cursor.read_with(KeywordReader(), self._give)
            return
        writer = ArgumentsWriter(self._give)
        self._finish = writer.finish
        schema = None if self._tools is None else self._tools[name]
        if isinstance(arguments, Tagged):
            yield from TaggedReader(cursor, calls, self._marks, writer, self._parameter_of).read(schema)
        else:
            yield from BareReader(cursor, calls, self._marks, writer, schema).read()

    def _object(self, kind: Json, fields: tuple[str, str]) -> Reads[None]:
        """A call that is one object, its members in any order."""
        cursor = self._cursor
        held = number = None
        yield from cursor.expect("{")
        while (yield from cursor.peek()) != "}":
            key = yield from self._member()
            if key == fields[0] and not self._started:
                name = yield from self._name()
                self._start(name, number=number)
                if held is not None:
                    self._give(self._object_text(held))
            elif key in (fields[1], *_ARGUMENTS) and not self._whole and held is None:
                if self._started:
                    yield from self._json_arguments()
                else:
                    held = yield from cursor.json_value()
            elif self._started or key in (*_BESIDE, kind.number):
                value = yield from cursor.json_value()
                number = value.strip('"') if key == kind.number else number
            else:
                raise MalformedCallError
            if not (yield from cursor.accept(",")):
                break
        yield from cursor.expect("}")
        if not self._started:
            raise MalformedCallError
        if not self._whole:
            self._give("{}")

    def _member(self) -> Reads[str]:
        """The key of a member and its colon."""
        if (yield from self._cursor.peek()) != '"':
            raise MalformedCallError
        key = yield from self._cursor.json_value()
        yield from self._cursor.expect(":")
        return key[1:-1]

    def _name(self) -> Reads[str]:
        """A tool's name as a JSON string."""
        cursor = self._cursor
        if (yield from cursor.peek()) != '"':
            raise MalformedCallError
        cursor.at += 1
        name = yield from cursor.until(['"'], self._may_be_name)
        self._check(name)
        cursor.at += 1
        return name

    def _json_arguments(self) -> Reads[None]:
        """The arguments as JSON: an object, or, as models write it at times, the text of one as a string."""
        if (yield from self._cursor.peek()) == "{":
            self._finish = lambda: None
            yield from self._cursor.json_value(self._give)
            return
        begin = self._cursor.at
        value = yield from self._cursor.json_value()
        try:
            self._give(self._object_text(value))
        except MalformedCallError:
            self._cursor.at = begin
            raise

    def _object_text(self, value: str) -> str:
        """The JSON text of arguments that came whole."""
        value = self._marks.spelled_json(value)
        if value.startswith('"'):
            try:
                value = string_of(value, strict=False).strip() or "{}"
            except ValueError:
                raise MalformedCallError from None
        text = json_text(value)
        if text == "null":
            return "{}"
        if text is None or not text.startswith("{"):
            raise MalformedCallError
        return text

    # --- parts of a call

    def _may_be_name(self, have: str) -> bool:
        if self._tools is None:
            return _NAME.fullmatch(have) is not None
        return any(name.startswith(have) for name in self._tools)

    def _check(self, name: str) -> None:
        if not name or (self._tools is not None and name not in self._tools):
            raise MalformedCallError

    def _start(self, name: str, id: str | None = None, number: str | None = None) -> None:
        self._started, self._whole, self._gap = True, False, ""
        self._finish = self._give_empty
        self._parts.append(CallStarted(self.calls, name, id, number))
        self._cursor.commit()

    def _give(self, fragment: str) -> None:
        self._whole = True
        self._parts.append(CallArguments(self.calls, self._marks.spelled_json(fragment)))

    def _give_empty(self) -> None:
        if not self._whole:
            self._give("{}")

    def _end(self, *, whole: bool = True) -> None:
        self._parts.append(CallEnded(self.calls, whole))
        self.calls += 1
        self._started, self._fresh = False, True
        self._cursor.commit()

    def _add_stretch(self, *, section: bool) -> None:
        begin, first = self._section_begin
        self.stretches.append(Stretch(begin, self._cursor.dropped, range(first, self.calls), section))

    def _end_cut(self, problem: Exception) -> None:
        """End a call that went wrong behind its start. What is left of its text is text, unless the reply has ended."""
        self._finish()
        if isinstance(problem, EndOfReplyError):
            self._cursor.at = len(self._cursor.text)
        self.cut_calls += 1
        self._end(whole=False)
