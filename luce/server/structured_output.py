"""What a request wants its reply to be, by whichever field says it: OpenAI's, vLLM's, llama.cpp's or SGLang's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from luce.server.errors import invalid, unsupported
from luce.server.schema import Common
from luce.text.gbnf import GbnfError, is_gbnf, lark_of_gbnf
from luce.text.reply_format import ReplyFormat, openai_format

_MOST_CHOICES = 1_000


def reply_format(request: Common, *, strict: bool = False) -> ReplyFormat | None:
    """The format that a request wants; None for free text. `strict`: every schema is, also where it does not say so.

    Raises RequestError that names the field for a format that is none, and for two formats.
    """
    found = list(_formats(request))
    if len(found) > 1:
        (first, _), (second, _) = found[:2]
        raise invalid(second, f"the request has {first} too; a reply follows one of them")
    if not found:
        return None
    form = found[0][1]
    return dataclasses.replace(form, strict=True) if strict else form


def _formats(request: Common) -> Iterator[tuple[str, ReplyFormat]]:
    """Each format of a request, with the field that has it."""
    if request.response_format is not None:
        form = openai_format(request.response_format)
        if form is not None:
            yield "response_format", form
    for field, make in _FIELDS.items():
        value = getattr(request, field)
        if value is not None and (value != "" or field != "grammar"):
            yield field, make(value, field)
    options = request.structured_outputs
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise invalid("structured_outputs", "expected an object")
    for name, value in options.items():
        param = f"structured_outputs.{name}"
        if value in (None, False):
            continue
        if name not in _STRUCTURED:
            raise unsupported(param, f"expected one of {', '.join(_STRUCTURED)}")
        yield param, _STRUCTURED[name](value, param)


def _json(value: Any, param: str) -> ReplyFormat:
    """A schema, or its text; `{}` is any object."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise invalid(param, "expected a JSON schema, which this text is not") from None
    if not isinstance(value, Mapping):
        raise invalid(param, "expected a JSON schema: an object")
    return ReplyFormat("json_schema", value, param=param) if value else ReplyFormat("json_object", param=param)


def _json_object(value: Any, param: str) -> ReplyFormat:
    if value is not True:
        raise invalid(param, "expected true or false")
    return ReplyFormat("json_object", param=param)


def _regex(value: Any, param: str) -> ReplyFormat:
    if not isinstance(value, str) or not value:
        raise invalid(param, "expected a regular expression")
    return ReplyFormat("regex", value, param=param)


def _choice(value: Any, param: str) -> ReplyFormat:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise invalid(param, "expected a list of texts, at least one")
    if len(value) > _MOST_CHOICES:
        raise invalid(param, f"expected at most {_MOST_CHOICES:,} texts, got {len(value):,}")
    return ReplyFormat("choice", value, param=param)


def _grammar(value: Any, param: str) -> ReplyFormat:
    """A grammar in Lark, or in GBNF."""
    if not isinstance(value, str) or not value.strip():
        raise invalid(param, "expected a grammar in Lark or GBNF")
    return _gbnf(value, param) if is_gbnf(value) else ReplyFormat("grammar", value, param=param)


def _gbnf(value: Any, param: str) -> ReplyFormat:
    if not isinstance(value, str) or not value.strip():
        raise invalid(param, "expected a grammar in GBNF")
    try:
        return ReplyFormat("grammar", lark_of_gbnf(value), param=param)
    except GbnfError as error:
        raise invalid(param, str(error)) from None


_Make = Callable[[Any, str], ReplyFormat]
_FIELDS: dict[str, _Make] = {
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _json,
    "grammar": _grammar,
    "regex": _regex,
    "ebnf": _gbnf,
}
#: entries of vLLM's `structured_outputs`
_STRUCTURED: dict[str, _Make] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
