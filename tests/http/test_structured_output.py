"""Formats of replies over HTTP: every field that asks for one, on every endpoint, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.http_server import Running, running
from tests.support.scripted_model import THOUGHT, saying

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GBNF = 'root ::= "<" [0-9]{2,3} ">"  # digits'
LARK = 'start: "<" /[0-9]{2,3}/ ">"'
#: towards `}`, so that any object ends
CLOSES = {str(ord("}")): 100}
OPENAI = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA, "strict": True}}


def is_json(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"a", "b"} and value["a"] in (1, 2) and value["b"] in ("x", "y")


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def is_digits(text: str) -> bool:
    return re.fullmatch("<[0-9]{2,3}>", text) is not None


def is_choice(text: str) -> bool:
    return text in ("yes", "no")


FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_object"}}, is_object),
    ({"response_format": OPENAI}, is_json),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}}, is_json),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_json),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, is_json),
    ({"guided_json": SCHEMA}, is_json),
    ({"guided_json": json.dumps(SCHEMA)}, is_json),
    ({"guided_json": {}}, is_object),
    ({"guided_regex": "<[0-9]{2,3}>"}, is_digits),
    ({"guided_choice": ["yes", "no"]}, is_choice),
    ({"guided_grammar": LARK}, is_digits),
    ({"guided_grammar": GBNF}, is_digits),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, is_json),
    ({"structured_outputs": {"json_object": True}}, is_object),
    ({"structured_outputs": {"regex": "<[0-9]{2,3}>"}}, is_digits),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, is_choice),
    ({"structured_outputs": {"grammar": LARK}}, is_digits),
    ({"json_schema": SCHEMA}, is_json),
    ({"grammar": GBNF}, is_digits),
    ({"grammar": LARK}, is_digits),
    ({"grammar": "", "json_schema": SCHEMA}, is_json),
    ({"regex": "^<[0-9]{2,3}>$"}, is_digits),
    ({"ebnf": GBNF}, is_digits),
]


async def text_of(here: Running, path: str, fields: dict[str, Any]) -> str:
    """The text of the reply of an endpoint."""
    if path == "/v1/chat/completions":
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    else:
        limit = "n_predict" if path == "/completion" else "max_tokens"
        body = {"prompt": "hi", limit: 300, "logit_bias": CLOSES}
    status, reply, _ = await here.post(path, {**body, "temperature": 0, **fields})
    assert status == 200, reply
    if path == "/completion":
        return reply["content"]
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
async def test_every_spelling_holds_the_reply(path: str) -> None:
    async with running() as here:
        for fields, holds in FORMS:
            assert holds(await text_of(here, path, fields)), fields


async def test_a_schema_of_messages_holds_the_reply() -> None:
    messages = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "temperature": 0}
    form = {"type": "json_schema", "schema": SCHEMA}
    async with running() as here:
        for fields in ({"output_config": {"format": form}}, {"output_format": form}):
            status, reply, _ = await here.post("/v1/messages", {**messages, **fields})
            assert status == 200, reply
            assert reply["stop_reason"] == "end_turn" and is_json(reply["content"][0]["text"])
        refused = {"type": "json_schema", "schema": {"properties": {"a": {"not": {}}}}}
        for field, fields in (
            ("output_config.format", {"output_config": {"format": refused}}),
            ("output_format", {"output_format": refused}),
        ):
            status, reply, _ = await here.post("/v1/messages", {**messages, **fields})
            assert status == 400 and reply["error"]["message"].startswith(f"{field}.schema.properties.a.not: ")


async def test_each_reply_of_several_is_held() -> None:
    async with running() as here:
        body = {"prompt": ["a", "b"], "n": 3, "max_tokens": 300, "temperature": 1, "guided_choice": ["yes", "no"]}
        _, reply, _ = await here.post("/v1/completions", body)
        assert len(reply["choices"]) == 6 and all(is_choice(choice["text"]) for choice in reply["choices"])


async def test_a_stream_is_held() -> None:
    async with running() as here:
        body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "response_format": OPENAI}
        events = await here.events("/v1/chat/completions", body)
        text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        assert is_json(text)


async def test_a_format_begins_behind_the_reasoning() -> None:
    script = saying([*b"free text, } too", THOUGHT, *b"\n\n"], marker="<think>\n")
    async with running(model={"script": script}) as here:
        reply = await here.chat(regex="<[0-9]{2,3}>", chat_template_kwargs={"enable_thinking": True})
        message = reply["choices"][0]["message"]
        assert message["reasoning_content"] == "free text, } too" and is_digits(message["content"])


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": 1}}},
            "response_format.json_schema.strict",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "king"}}}},
            "response_format.json_schema.schema.type",
            "invalid_schema",
        ),
        ({"guided_json": [1]}, "guided_json", "invalid_value"),
        ({"guided_json": "{"}, "guided_json", "invalid_value"),
        ({"guided_json": {"properties": {"a": {"minLength": "x"}}}}, "guided_json.properties.a.minLength", None),
        ({"guided_json": {"enum": []}}, "guided_json.enum", "invalid_schema"),
        ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 1}}, "guided_json", "invalid_schema"),
        ({"guided_json": {"$ref": "#/$defs/a"}}, "guided_json.$ref", "invalid_schema"),
        ({"guided_json": {"$ref": "#"}}, "guided_json.$ref", "invalid_schema"),
        ({"guided_json": {"enum": list(range(10_001))}}, "guided_json.enum", "schema_too_complex"),
        ({"guided_regex": "("}, "guided_regex", "invalid_value"),
        ({"guided_regex": 5}, "guided_regex", "invalid_value"),
        ({"guided_regex": ""}, "guided_regex", "invalid_value"),
        ({"guided_choice": []}, "guided_choice", "invalid_value"),
        ({"guided_choice": ["a", 1]}, "guided_choice", "invalid_value"),
        ({"guided_choice": ["a"] * 1001}, "guided_choice", "invalid_value"),
        ({"grammar": {"type": "object"}}, "grammar", "invalid_value"),
        ({"grammar": "start: foo"}, "grammar", "invalid_value"),
        ({"grammar": "root ::= foo"}, "grammar", "invalid_value"),
        ({"ebnf": LARK}, "ebnf", "invalid_value"),
        ({"ebnf": 1}, "ebnf", "invalid_value"),
        ({"json_schema": 1}, "json_schema", "invalid_value"),
        ({"structured_outputs": []}, "structured_outputs", "invalid_value"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "unsupported_parameter",
        ),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "invalid_value"),
        ({"regex": "a", "guided_choice": ["a"]}, "regex", "invalid_value"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "invalid_value"),
        ({"regex": "a", "stop_regex": "b"}, "stop_regex", "unsupported_parameter"),
    ],
)
async def test_mistakes_name_their_field(fields: dict[str, Any], param: str, code: str | None) -> None:
    async with running() as here:
        status, body, _ = await here.post("/v1/completions", {"prompt": "a", **fields})
        assert status == 400, body
        assert (body["error"]["param"], body["error"]["code"]) == (param, code or "invalid_schema")
        assert body["error"]["message"].startswith(f"{param}: ")


async def test_two_formats_are_refused_with_both_names() -> None:
    async with running() as here:
        _, body, _ = await here.post("/v1/completions", {"prompt": "a", "response_format": OPENAI, "grammar": LARK})
        assert body["error"]["message"] == "grammar: the request has response_format too; a reply follows one of them"


@pytest.mark.parametrize(
    ("grammar", "place"), [("start: a\na: foo", "line 2, column 4"), ("root ::= a\nb ::= a", "line 1")]
)
async def test_a_mistake_in_a_grammar_has_its_place(grammar: str, place: str) -> None:
    async with running() as here:
        _, body, _ = await here.post("/v1/completions", {"prompt": "a", "grammar": grammar})
        assert body["error"]["message"].startswith(f"grammar: {place}: ")
