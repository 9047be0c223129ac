"""Remembers the ids of calls of tools by their meaning: clients and templates write a call in another way than a model.

What counts is the dialect, and for each call the tool's name, the model's id, and the JSON value of the arguments.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from luce.engine.events import Texts
from luce.models.calls import Json
from luce.text.call_parser import CallParser, Stretch
from luce.text.detokenizer import Detokenizer
from luce.text.marks import Marks
from luce.text.parameter_types import Schema, certain_parameter_of
from luce.text.reasoning import Splitter
from luce.text.reply_parser import CallArguments, CallStarted
from luce.text.token_memory import TokenMemory
from luce.text.tokenizer import Tokenizer

Schemas = Mapping[str, Schema | None]
_NUMBER = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([-+]?\d+))?")


class Known(NamedTuple):
    """A stretch of a prompt whose ids are known."""

    #: offsets in the prompt's text
    begin: int
    end: int
    ids: tuple[int, ...]


class CallMemory:
    """The stretches from a trigger to its close, and their ids, in the memory of texts. Thread-safe."""

    def __init__(self, marks: Marks, tokenizer: Tokenizer, memory: TokenMemory) -> None:
        self._marks = marks
        self._tokenizer = tokenizer
        self._memory = memory
        # The id that a model writes into a call is not the one that clients get, and results name the latter.
        self._works = not (isinstance(marks.calls.arguments, Json) and marks.calls.arguments.id)

    def remember(self, reply: Sequence[int], schemas: Schemas, splitter: Splitter | None) -> Texts:
        """Remember the calls of a reply, and return them with their positions. `splitter` separates the reasoning."""
        if not self._works:
            return ()
        text, tokens = self._marked(reply)
        deltas = [] if splitter is None else [splitter.push(text), splitter.flush()]
        content = text if splitter is None else "".join(delta.content for delta in deltas)
        if not text.endswith(content):
            return ()
        before = len(text) - len(content)
        found = []
        for stretch, meaning in self._longest(content, schemas):
            begin, end = tokens.get(stretch.begin + before), tokens.get(stretch.end + before)
            if begin is not None and end is not None:
                self._memory.add(meaning, tuple(reply[begin:end]))
                found.append((meaning, begin, end))
        return tuple(found)

    def find(self, text: str, marks: Mapping[int, str], schemas: Schemas) -> Iterator[Known]:
        """The known calls of a prompt's text, in order. `marks`: the text for which a code point stands in it."""
        for begin, marked, offsets in self._parts(text) if self._works else ():
            end = 0
            for trigger, group in itertools.groupby(self._stretches(marked, schemas, marks), lambda one: one[0].begin):
                # The longest first.
                for stretch, meaning in reversed(list(group)) if trigger >= end else ():
                    ids = self._memory.find(meaning, functools.partial(self._means, schemas, meaning))
                    if ids is not None:
                        end = stretch.end
                        yield Known(begin + offsets(trigger), begin + offsets(end), ids)
                        break

    def _means(self, schemas: Schemas, meaning: str, ids: Sequence[int]) -> bool:
        """Whether ids are one stretch of this meaning."""
        text, _ = self._marked(ids)
        found = list(self._longest(text, schemas))
        return len(found) == 1 and found[0][0][:2] == (0, len(text)) and found[0][1] == meaning

    def _longest(self, text: str, schemas: Schemas) -> Iterator[tuple[Stretch, str]]:
        for _, group in itertools.groupby(self._stretches(text, schemas, {}), lambda one: one[0].begin):
            yield list(group)[-1]

    def _stretches(self, text: str, schemas: Schemas, marks: Mapping[int, str]) -> Iterator[tuple[Stretch, str]]:
        """The stretches of a marked text, with digests of their meanings."""
        parser = CallParser(self._marks, schemas, certain_parameter_of)
        names: dict[int, tuple[str, str]] = {}
        arguments: dict[int, str] = {}
        for part in [*parser.push(text), *parser.flush()]:
            if isinstance(part, CallStarted):
                names[part.call] = part.name, part.id or ""
            elif isinstance(part, CallArguments):
                arguments[part.call] = arguments.get(part.call, "") + part.fragment
        for stretch in parser.stretches:
            try:
                calls = [[*names[call], _value(arguments[call], marks)] for call in stretch.calls]
            except ValueError:
                continue
            meaning = json.dumps([self._marks.calls.format, stretch.section, calls])
            yield stretch, hashlib.blake2b(meaning.encode(), digest_size=16, person=b"calls").hexdigest()

    def _marked(self, ids: Sequence[int]) -> tuple[str, dict[int, int]]:
        """The marked text of ids, and how many of them end at an offset in it, where a character ends there."""
        decoder = Detokenizer(self._tokenizer, continues=True)
        text, tokens = "", {0: 0}
        for i, token in enumerate(ids):
            mark = self._marks.of_token.get(token)
            if mark is not None:
                text += decoder.flush()
                decoder.push(token)
            piece = decoder.push(token) if mark is None else mark
            text += piece
            if piece:
                tokens[len(text)] = i + 1
        return text + decoder.flush(), tokens

    def _is_control(self, text: str) -> bool:
        return any(token is not None for token, _ in self._tokenizer.control.cut(text))

    def _parts(self, text: str) -> Iterator[tuple[int, str, Callable[[int], int]]]:
        """The marked texts between special tokens that are of no call: begin, text, and its offsets in the text."""
        at = begin = 0
        marked, places = "", [(0, 0)]
        for token, piece in self._tokenizer.special.cut(text):
            mark = None if token is None else self._marks.of_token.get(token)
            if token is not None and mark is None and self._is_control(piece):
                yield begin, marked, _offsets(places)
                begin, marked, places = at + len(piece), "", [(0, 0)]
            else:
                marked += piece if mark is None else mark
                places.append((len(marked), at + len(piece) - begin))
            at += len(piece)
        yield begin, marked, _offsets(places)


def _offsets(places: Sequence[tuple[int, int]]) -> Callable[[int], int]:
    """From an offset in a marked text to that in the text. `places`: where pieces begin in both."""

    def find(at: int) -> int:
        marked, plain = places[bisect_right(places, (at, sys.maxsize)) - 1]
        return plain + at - marked

    return find


def _value(text: str, marks: Mapping[int, str]) -> Any:
    """A JSON value in a form that all its texts share. Raises ValueError for keys that occur twice."""

    def plain(value: Any) -> Any:
        if isinstance(value, str):
            return value.translate(marks)
        if isinstance(value, list):
            return ["list", *map(plain, value)]
        if not isinstance(value, tuple):
            return value
        members = {plain(key): plain(item) for key, item in value}
        if len(members) < len(value):
            raise ValueError("a key occurs twice")
        return ["object", sorted(members.items())]

    # Pairs become tuples and numbers dicts, so nothing else is one.
    return plain(json.loads(text, object_pairs_hook=tuple, parse_int=_number, parse_float=_number))


def _number(text: str) -> dict[str, Any]:
    """A number, exactly: sign, digits and exponent without trailing zeros."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise ValueError(f"{text} is no number")
    sign, whole, fraction, exponent = found.groups(default="")
    digits = (whole + fraction).lstrip("0")
    kept = digits.rstrip("0")
    place = int(exponent or "0") - len(fraction) + len(digits) - len(kept)
    return {sign + (kept or "0"): place if kept else 0}
