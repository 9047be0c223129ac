"""The grammar of a reply, from the format that a request wants."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from luce.text.grammar_library import EMPTY, INVALID, GrammarError, regex_rule
from luce.text.grammar_options import GrammarOptions
from luce.text.lark import json_rule, text_rule
from luce.text.plain_schema import LEAST_VALUE, Place, PlainSchema, plain_schema
from luce.text.reply_format import JSON_KINDS, ReplyFormat
from luce.text.schema_limits import SchemaError, check_pattern, too_complex

if TYPE_CHECKING:
    from llguidance import LLMatcher

#: schemas that are replaced by `true` until the rest compiles
_MOST_REPLACED = 8
#: schemas that are compiled alone to find the one that does not compile
_MOST_TRIED = 64
# Integers of the digits that those below LEAST_VALUE have.
_LEAST_INTEGERS = re.compile(r"-922337203685477[0-9]{4}(?![0-9])")


class Compile(Protocol):
    """GrammarLibrary.matcher."""

    def __call__(self, lark: str, **grammars: str) -> LLMatcher:
        """The state at a grammar's beginning. Raises GrammarError."""


class ReplyGrammar(NamedTuple):
    """A compiled grammar."""

    matcher: LLMatcher
    #: paths of what is not enforced
    relaxed: tuple[str, ...] = ()
    #: the piece of grammar for it; `@body` is the grammar of the request
    rule: str = ""


def reply_grammar(
    form: ReplyFormat,
    compiled: Compile,
    *,
    blank: str,
    options: GrammarOptions = GrammarOptions(),  # noqa: B008  # frozen
) -> ReplyGrammar:
    """The grammar of a format; `blank`: a piece of grammar for what stands before it.

    Raises SchemaError with a path in the format's value.
    """
    if len(form.text) > options.schema_max_kib << 10:
        raise too_complex("", f"has {len(form.text) >> 10:,} KiB, expected at most {options.schema_max_kib:,}")
    if form.kind in JSON_KINDS:
        plain = plain_schema({"type": "object"} if form.kind == "json_object" else form.value, strict=form.strict)
        return schema_grammar(plain, compiled, blank=blank, strict=form.strict, compact=options.compact_json)
    try:
        if form.kind == "grammar":
            _check_integers(form.value)
            # Alone, its mistakes have their place in the text of the request.
            found = compiled(f"start: {blank}@body\n", body=form.value) if blank else compiled(form.value)
            return ReplyGrammar(found, rule="@body")
        if form.kind == "choice":
            rule = " | ".join(map(text_rule, form.value))
        else:
            check_pattern("", form.value)
            rule = regex_rule(form.value)
        return ReplyGrammar(compiled(_whole(rule, blank)), rule=rule)
    except GrammarError as error:
        # Only a grammar is compiled as it stands in the request.
        reason = str(error) if form.kind == "grammar" else error.reason
        raise SchemaError("", reason, INVALID if error.code == EMPTY else str(error.code)) from None


def _check_integers(lark: str) -> None:
    """Refuse a Lark grammar with schemas that have an integer at which the library ends the process: it compiles them
    as they stand."""
    if "%json" in lark and any(int(found) < LEAST_VALUE for found in _LEAST_INTEGERS.findall(lark)):
        raise SchemaError("", "the least integers of 64 bits cannot be enforced", INVALID)


# --- schemas


def schema_grammar(
    plain: PlainSchema, compiled: Compile, *, blank: str, strict: bool, compact: bool = False
) -> ReplyGrammar:
    """The grammar of a plain schema; if it is not strict, a schema inside it that the library refuses allows anything.
    `compact` as in json_rule.

    Raises SchemaError with the path of the smallest schema that the library refuses.
    """
    schema, relaxed = plain.schema, list(plain.relaxed)
    for left in reversed(range(_MOST_REPLACED + 1)):
        rule = json_rule(schema, compact=compact)
        try:
            return ReplyGrammar(compiled(_whole(rule, blank)), tuple(dict.fromkeys(relaxed)), rule)
        except GrammarError as error:
            if error.code not in (EMPTY, INVALID):
                raise SchemaError("", str(error), str(error.code)) from None
            place = _culprit(schema, compiled)
            if strict or error.code == EMPTY or not place or not left:
                code = "invalid_schema" if error.code == EMPTY else "unsupported_schema"
                raise SchemaError(plain.path(place), error.reason, code) from None
            relaxed.append(plain.path(place))
            schema = _replaced(schema, place)
    raise AssertionError("the last try returns or raises")


def _whole(rule: str, blank: str = "") -> str:
    return f"start: {blank}body\nbody: {rule}\n"


def _culprit(schema: Mapping[str, Any], compiled: Compile) -> Place:
    """The place of the smallest schema that the library refuses, as far as few tries find it: it names no place."""
    defs, place, left = schema.get("$defs", {}), Place(()), _MOST_TRIED
    while True:
        for inner in _inner_places(schema, place):
            if left == 0:
                return place
            left -= 1
            found = _at(schema, inner)
            if not isinstance(found, dict):
                continue
            try:
                compiled(_whole(json_rule({**found, "$defs": defs} if defs else found)))
            except GrammarError:
                place = inner
                break
        else:
            return place


def _inner_places(schema: Mapping[str, Any], place: Place) -> Iterator[Place]:
    """Places of the schemas directly inside one, or of what it refers to."""
    found = _at(schema, place)
    if ref := found.get("$ref"):
        target = Place(("$defs", ref.rpartition("/")[2]))
        if target != place:
            yield target
    for key in ("items", "additionalProperties"):
        if key in found:
            yield Place((*place, key))
    for key in ("properties", "patternProperties"):
        for name in found.get(key, {}):
            yield Place((*place, key, name))
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for i in range(len(found.get(key, ()))):
            yield Place((*place, key, i))


def _at(schema: Any, place: Place) -> Any:
    for key in place:
        schema = schema[key]
    return schema


def _replaced(schema: Any, place: Place) -> Any:
    """The schema with `true` at a place."""
    if not place:
        return True
    key, rest = place[0], Place(place[1:])
    if isinstance(schema, list):
        return [_replaced(inner, rest) if i == key else inner for i, inner in enumerate(schema)]
    return {**schema, key: _replaced(schema[key], rest)}
