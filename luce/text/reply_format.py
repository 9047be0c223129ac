"""What a request wants its reply to be: JSON by a schema, one of several texts, or text by a grammar."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from luce.errors import RequestError

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]

JSON_KINDS = ("json_object", "json_schema")


@dataclass(frozen=True)
class ReplyFormat:
    """What a reply, behind its reasoning, is."""

    kind: Kind
    #: json_schema: the schema; regex: the pattern of the whole reply; choice: the texts; grammar: in Lark
    value: Any = None
    #: every keyword of the schema is enforced, or the request refused
    strict: bool = False
    #: the field of the request that holds the value, which errors name
    param: str = "response_format"

    @functools.cached_property
    def text(self) -> bytes:
        """What tells formats apart, whatever field they come from."""
        return msgspec.json.encode((self.kind, self.value, self.strict))


def openai_format(form: Mapping[str, Any], param: str = "response_format") -> ReplyFormat | None:
    """The format by OpenAI's `response_format`; None for free text. Raises RequestError for one that is none."""
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = form.get("schema")
        if schema is None:
            return ReplyFormat("json_object", param=param)
        # llama.cpp's spelling of json_schema.
        return ReplyFormat("json_schema", _schema(schema, f"{param}.schema"), param=f"{param}.schema")
    if kind != "json_schema":
        raise _invalid(f"{param}.type", f"expected text, json_object or json_schema, got {str(kind)[:80]!r}")
    body, where = form.get("json_schema"), f"{param}.json_schema"
    if body is None and "schema" in form:
        # llama.cpp's and the Responses API's spelling.
        body, where = form, param
    if not isinstance(body, Mapping):
        raise _invalid(where, "expected an object")
    strict = body.get("strict")
    if not isinstance(strict, bool | None):
        raise _invalid(f"{where}.strict", "expected true or false")
    where = f"{where}.schema"
    return ReplyFormat("json_schema", _schema(body.get("schema"), where), strict=bool(strict), param=where)


def _schema(schema: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping):
        raise _invalid(param, "expected a JSON schema: an object")
    return schema


def _invalid(param: str, why: str) -> RequestError:
    return RequestError(f"{param}: {why}", param=param, code="invalid_value")
