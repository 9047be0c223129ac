"""Remembers the ids of calls of tools by their meaning: clients and templates write a call in another way than a model.

What counts is the dialect, and for each call the tool's name, the model's id or number, and the JSON value of the
arguments. Results name a number: a call with one that the template does not write is another call.

A conversation may hold the same call twice, written in two ways. So behind the ids of its prompt a reply is known up to
its last call, by its texts without the white space around them and by what its calls mean. Behind other ids, as where
a template leaves reasoning out, each call is known by what it means, as it was written last.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import re
import sys
from array import array
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
_NO_MARKS: Mapping[int, str] = {}
#: most tokens of a prompt between its last control token and the reply: what opens a reply is short, other text is not
#: read again
_LONGEST_OPENING = 256


class Known(NamedTuple):
    """A stretch of a prompt whose ids are known."""

    #: offsets in the prompt's text
    begin: int
    end: int
    ids: tuple[int, ...]


class PromptDigest:
    """The digest of the ids of a prompt that grows."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._taken = 0

    def of(self, ids: Sequence[int]) -> bytes:
        """The digest of ids that begin with those of the last call."""
        self._hash.update(array("q", ids[self._taken :]).tobytes())
        self._taken = len(ids)
        return self._hash.digest()


class _Written(NamedTuple):
    """Calls in a marked text."""

    stretch: Stretch
    #: of each call the tool's name, the model's id or number, and the arguments as JSON
    calls: list[tuple[str, str, str]]


class CallMemory:
    """Replies up to their last call, and the stretches from a trigger to its close, with their ids, in the memory of
    texts. Thread-safe."""

    def __init__(self, marks: Marks, tokenizer: Tokenizer, memory: TokenMemory) -> None:
        self._marks = marks
        self._tokenizer = tokenizer
        self._memory = memory
        # The id that a model writes into a call is not the one that clients get, and results name the latter.
        self._works = not (isinstance(marks.calls.arguments, Json) and marks.calls.arguments.id)

    def remember(
        self, prompt: Sequence[int], reply: Sequence[int], schemas: Schemas, splitter: Splitter | None
    ) -> Texts:
        """Remember a reply up to its last call, and each of its calls; return them with their positions in the prompt
        and the reply. `splitter` separates the reasoning."""
        if not self._works:
            return ()
        return (*self._remember_calls(prompt, reply, schemas, splitter), *self._remember_parts(prompt, reply, schemas))

    def find(
        self, text: str, marks: Mapping[int, str], schemas: Schemas, before: Callable[[int], bytes]
    ) -> Iterator[Known]:
        """The known stretches of a prompt's text, in order. `marks`: the text for which a code point stands in it;
        `before`: the digest of the prompt's ids up to an offset in the text, ascending."""
        for begin, marked, offsets in self._parts(text) if self._works else ():
            calls = self._written(marked, schemas)
            if not calls:
                continue
            end, (meaning,) = self._up_to_last_call(marked, calls, marks, _READINGS[:1])
            digest = _hashed(b"replies", before(begin) + meaning.encode())
            ids = self._memory.find(digest, functools.partial(self._is_part, schemas, meaning))
            if ids is not None:
                yield Known(begin, begin + offsets(end), ids)
            else:
                yield from self._find_calls(begin, calls, offsets, marks, schemas)

    # --- a reply up to its last call

    def _remember_parts(self, prompt: Sequence[int], reply: Sequence[int], schemas: Schemas) -> Texts:
        begin = len(prompt)
        while begin and not self._divides(prompt[begin - 1]):
            begin -= 1
        if len(prompt) - begin > _LONGEST_OPENING:
            return ()
        whole = array("q", prompt)
        whole.extend(reply)
        digest, found = PromptDigest(), []
        for divides, run in itertools.groupby(whole[begin:], self._divides):
            ids = tuple(run)
            text, tokens = ("", {}) if divides else self._marked(ids)
            calls = self._written(text, schemas)
            if calls:
                at, meanings = self._up_to_last_call(text, calls)
                end = tokens.get(at)
                before = digest.of(whole[:begin])
                for meaning in meanings if end is not None else ():
                    known = _hashed(b"replies", before + meaning.encode())
                    self._memory.add(known, ids[:end])
                    found.append((known, begin, begin + len(ids[:end])))
            begin += len(ids)
        return tuple(found)

    def _up_to_last_call(
        self,
        text: str,
        calls: Sequence[Sequence[_Written]],
        marks: Mapping[int, str] = _NO_MARKS,
        readings: Sequence[_Reading] = (),
    ) -> tuple[int, list[str]]:
        """Where the last call of a part ends, and what the part means up to there to programs that read JSON so; by
        default, to all through which a call may come back."""
        texts, at = [], 0
        longest = [group[-1] for group in calls]
        for written in longest:
            texts.append(self._marks.spelled(text[at : written.stretch.begin]).translate(marks).strip())
            at = written.stretch.end
        readings = readings or _READINGS
        found = [json.dumps([texts, [self._meaning(one, marks, reading) for one in longest]]) for reading in readings]
        return at, list(dict.fromkeys(found))

    def _is_part(self, schemas: Schemas, meaning: str, ids: Sequence[int]) -> bool:
        """Whether ids are a part up to its last call, of this meaning."""
        text, _ = self._marked(ids)
        calls = self._written(text, schemas)
        end, meanings = self._up_to_last_call(text, calls)
        return end == len(text) and meaning in meanings

    # --- each call

    def _remember_calls(
        self, prompt: Sequence[int], reply: Sequence[int], schemas: Schemas, splitter: Splitter | None
    ) -> Texts:
        text, tokens = self._marked(reply)
        deltas = [] if splitter is None else [splitter.push(text), splitter.flush()]
        content = text if splitter is None else "".join(delta.content for delta in deltas)
        if not text.endswith(content):
            return ()
        before = len(text) - len(content)
        found = []
        for *_, written in self._written(content, schemas):
            begin, end = tokens.get(written.stretch.begin + before), tokens.get(written.stretch.end + before)
            digest = self._digest(written)
            if begin is not None and end is not None and digest is not None:
                self._memory.add(digest, tuple(reply[begin:end]))
                found.append((digest, len(prompt) + begin, len(prompt) + end))
        return tuple(found)

    def _find_calls(
        self,
        begin: int,
        calls: Sequence[Sequence[_Written]],
        offsets: Callable[[int], int],
        marks: Mapping[int, str],
        schemas: Schemas,
    ) -> Iterator[Known]:
        """The known calls of a part."""
        end = 0
        for group in calls:
            trigger = group[0].stretch.begin
            # The longest first.
            for written in reversed(group) if trigger >= end else ():
                digest = self._digest(written, marks)
                if digest is None:
                    continue
                ids = self._memory.find(digest, functools.partial(self._is_calls, schemas, digest))
                if ids is not None:
                    end = written.stretch.end
                    yield Known(begin + offsets(trigger), begin + offsets(end), ids)
                    break

    def _is_calls(self, schemas: Schemas, digest: str, ids: Sequence[int]) -> bool:
        """Whether ids are one stretch with this digest."""
        text, _ = self._marked(ids)
        calls = self._written(text, schemas)
        if len(calls) != 1:
            return False
        longest = calls[0][-1]
        return longest.stretch[:2] == (0, len(text)) and self._digest(longest) == digest

    # --- meanings

    def _written(self, text: str, schemas: Schemas) -> list[list[_Written]]:
        """The calls in a marked text: for each trigger the stretches behind it, the shortest first."""
        parser = CallParser(self._marks, schemas, certain_parameter_of)
        names: dict[int, tuple[str, str]] = {}
        arguments: dict[int, str] = {}
        for part in [*parser.push(text), *parser.flush()]:
            if isinstance(part, CallStarted):
                names[part.call] = part.name, part.id or part.number or ""
            elif isinstance(part, CallArguments):
                arguments[part.call] = arguments.get(part.call, "") + part.fragment
        found = (
            _Written(stretch, [(*names[call], arguments[call]) for call in stretch.calls])
            for stretch in parser.stretches
        )
        return [list(group) for _, group in itertools.groupby(found, lambda written: written.stretch.begin)]

    def _meaning(self, written: _Written, marks: Mapping[int, str], reading: _Reading) -> list[Any]:
        """What calls mean. Raises ValueError as _value."""
        calls = [[name, id, _value(arguments, marks, reading)] for name, id, arguments in written.calls]
        return [self._marks.calls.format, written.stretch.section, calls]

    def _digest(self, written: _Written, marks: Mapping[int, str] = _NO_MARKS) -> str | None:
        """The digest of what calls mean; None if a key occurs twice."""
        try:
            return _hashed(b"calls", json.dumps(self._meaning(written, marks, _EXACT)).encode())
        except ValueError:
            return None

    # --- texts

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

    def _divides(self, token: int) -> bool:
        """Whether a token stands between parts: a control token that stands in no call."""
        return self._marks.of_token.get(token) not in self._marks.inside_calls and self._tokenizer.is_control(token)

    def _parts(self, text: str) -> Iterator[tuple[int, str, Callable[[int], int]]]:
        """The marked texts between tokens that divide: begin, text, and its offsets in the text."""
        at = begin = 0
        marked, places = "", [(0, 0)]
        for token, piece in self._tokenizer.special.cut(text):
            mark = None if token is None else self._marks.of_token.get(token)
            if token is not None and self._divides(token):
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


def _hashed(kind: bytes, meaning: bytes) -> str:
    return hashlib.blake2b(meaning, digest_size=16, person=kind).hexdigest()


def _value(text: str, marks: Mapping[int, str], reading: _Reading) -> Any:
    """A JSON value in a form that all its texts share. Raises ValueError for keys that occur twice, if none may."""

    def plain(value: Any) -> Any:
        if isinstance(value, str):
            return value.translate(marks)
        if isinstance(value, list):
            return ["list", *map(plain, value)]
        if not isinstance(value, tuple):
            return value
        members = {plain(key): plain(item) for key, item in value}
        if len(members) < len(value) and not reading.last_of_equal_keys:
            raise ValueError("a key occurs twice")
        return ["object", sorted(members.items())]

    # Pairs become tuples and numbers dicts, so nothing else is one.
    return plain(json.loads(text, object_pairs_hook=tuple, parse_int=reading.integer, parse_float=reading.real))


def _rounded(text: str) -> dict[str, Any]:
    """A number as float64, in the form of `_number`; one that is too large for it stays exact."""
    value = float(text)
    return _number(text if math.isinf(value) else repr(value))


def _number(text: str) -> dict[str, Any]:
    """A number, exactly: sign, digits and exponent without trailing zeros. Zero has no sign."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise ValueError(f"{text} is no number")
    sign, whole, fraction, exponent = found.groups(default="")
    digits = (whole + fraction).lstrip("0")
    kept = digits.rstrip("0")
    place = int(exponent or "0") - len(fraction) + len(digits) - len(kept)
    return {sign + kept: place} if kept else {"0": 0}


class _Reading(NamedTuple):
    """How a program reads JSON."""

    integer: Callable[[str], dict[str, Any]]
    #: a number with a point or an exponent
    real: Callable[[str], dict[str, Any]]
    #: of equal keys the last counts; otherwise none may occur twice
    last_of_equal_keys: bool = True


_EXACT = _Reading(_number, _number, last_of_equal_keys=False)
#: Python's, whose values templates get, and JavaScript's
_READINGS = (_Reading(_number, _rounded), _Reading(_rounded, _rounded))
