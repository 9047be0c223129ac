"""Schemas that take long to compile, and hostile ones, beside other requests."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luce.text.grammar_library import GrammarLibrary
from tests.support.http_server import Running, running
from tests.support.scripted_model import REPLY

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
SLOW = {
    "type": "object",
    "properties": {"slow": {"const": "slow"}},
    "required": ["slow"],
    "additionalProperties": False,
}
QUICK = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}


class Gate:
    """Grammars with the word `slow` compile when the gate opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.begun = threading.Semaphore(0)
        self.calls = 0
        original = GrammarLibrary.matcher

        def matcher(library: GrammarLibrary, lark: str, **grammars: str) -> Any:
            if "slow" in lark:
                self.calls += 1
                self.begun.release()
                assert self.open.wait(60)
            return original(library, lark, **grammars)

        monkeypatch.setattr(GrammarLibrary, "matcher", matcher)

    async def taken(self, slots: int) -> None:
        """Wait until so many compiles have begun."""
        for _ in range(slots):
            await asyncio.to_thread(self.begun.acquire)


def asked(here: Running, schema: Any, **fields: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(here.post(CHAT, {**HI, "json_schema": schema, **fields}))


async def test_a_slow_schema_delays_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    async with running(grammar_seconds=600, parallel=4) as here:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
        async with here.client.post(here.url + "/v1/completions", json=body) as stream:
            await stream.content.readline()
            slow = asked(here, SLOW)
            await gate.taken(1)
            # A stream that runs goes on, a plain request and another schema are answered meanwhile.
            assert (await here.chat())["choices"][0]["message"]["content"] == REPLY
            status, reply, _ = await asked(here, QUICK)
            assert status == 200 and json.loads(reply["choices"][0]["message"]["content"]) == {"a": 1}
            received = 0
            while received < 300:
                received += (await stream.content.readline()).startswith(b"data: {")
            assert not slow.done()
            gate.open.set()
        status, reply, _ = await slow
        assert status == 200 and json.loads(reply["choices"][0]["message"]["content"]) == {"slow": "slow"}


async def test_a_schema_that_takes_too_long_is_refused_and_those_behind_it_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    async with running(grammar_seconds=0.2) as here:
        slow = [asked(here, {**SLOW, "minProperties": i}) for i in range(2)]
        await gate.taken(2)
        behind = asked(here, QUICK)
        for status, reply, _ in await asyncio.gather(*slow):
            assert (status, reply["error"]["code"]) == (400, "schema_too_complex")
            assert reply["error"]["message"] == "json_schema: takes longer than 0.2 s to compile"
        status, reply, headers = await behind
        assert (status, reply["error"]["code"]) == (503, "overloaded") and int(headers["Retry-After"]) >= 1
        assert (await here.chat())["choices"][0]["message"]["content"] == REPLY
        gate.open.set()
        # What is known to be too slow is refused without another try.
        status, reply, _ = await asked(here, {**SLOW, "minProperties": 1})
        assert status == 400 and gate.calls == 2
        assert await here.metric("luce_grammar_refused_total") == 4


async def test_a_hundred_requests_with_four_schemas_compile_four_times(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    schemas = [
        {"type": "object", "properties": {"slow": {"const": i}}, "required": ["slow"], "additionalProperties": False}
        for i in range(4)
    ]
    async with running(grammar_seconds=600, max_queue=200) as here:
        tasks = [asked(here, schemas[i % 4]) for i in range(100)]
        await gate.taken(2)
        gate.open.set()
        for i, (status, reply, _) in enumerate(await asyncio.gather(*tasks)):
            assert status == 200 and json.loads(reply["choices"][0]["message"]["content"]) == {"slow": i % 4}
        assert gate.calls == 4
        assert await here.metric("luce_grammar_cache_misses_total") == 4
        assert await here.metric("luce_grammar_cache_hits_total") == 96
        assert await here.metric("luce_grammar_compile_seconds_count") == 4


async def test_a_client_that_leaves_while_its_schema_compiles_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    async with running(grammar_seconds=600) as here:
        slow = asked(here, SLOW)
        await gate.taken(1)
        slow.cancel()
        await here.until(lambda: here.server.active == 0)
        gate.open.set()
        assert (await asked(here, SLOW))[0] == 200 and gate.calls == 1


async def test_details_say_what_was_left_out() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1, "not": {}}, "b": {"pattern": "("}}, "required": ["a"]}
    async with running() as here:
        reply = await here.chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        grammar = reply["choices"][0]["finish_details"]["grammar"]
        assert grammar == {
            "kind": "json_schema",
            "relaxed": [f"response_format.json_schema.schema.properties.{path}" for path in ("a.not", "b")],
            "forced": grammar["forced"],
        }
        assert await here.metric("luce_grammar_relaxed_total") == 2
        assert "grammar" not in (await here.chat())["choices"][0]["finish_details"]
    async with running(strict_schemas=True) as here:
        status, reply, _ = await asked(here, schema)
        assert (status, reply["error"]["param"]) == (400, "json_schema.properties.a.not")


HOSTILE: list[Any] = [
    {"type": "integer", "multipleOf": 999983},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}},
    {"allOf": [{"type": "string", "pattern": f"[a-z]{{3,}}{i}.*x"} for i in range(19)]},
    {"enum": [str(i) for i in range(100_000)]},
    {"enum": [str(i) * 5 for i in range(10_000)]},
    {"allOf": [{"anyOf": [{"pattern": f"a{i}"}, {"pattern": f"b{i}"}]} for i in range(14)]},
    {"type": "string", "pattern": "(((a*)*)*)*" + "(([a-z])+.)+"},
    {"type": "string", "pattern": "(a{1000}){1000}"},
    {"type": "string", "minLength": 10**6},
    {"type": "array", "minItems": 100_000},
    {"type": "array", "items": {"type": "array", "minItems": 100_000}, "minItems": 100_000},
    {
        "$defs": {"a": {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/a"} for i in range(60)}}},
        "$ref": "#/$defs/a",
    },
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False},
    {"const": json.loads("[" * 300 + "]" * 300)},
    {"type": "string", "pattern": "(" * 1000 + ")" * 1000},
    {"type": "string", "pattern": "(a|b)*a(a|b){18}c", "minLength": 20},
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"anyOf": [{"const": i}, {"const": -i}]}}} for i in range(1, 12)
        ]
    },
    {"properties": {"\x00\x7f\u2028\U0001f600": {"const": "\x00\ud7ff"}}, "required": ["\x00\x7f\u2028\U0001f600"]},
    {"type": "object", "patternProperties": {f"^{c}+{i}": {} for i in range(20) for c in "abcde"}},
]


async def ends(here: Running, schema: Any, **fields: Any) -> None:
    """A reply to a schema comes, or a refusal that names it."""
    body = {"prompt": "a", "max_tokens": 4, "temperature": 0, "guided_json": schema, **fields}
    status, reply, _ = await here.post("/v1/completions", body)
    assert status in (200, 400, 422), (status, reply, schema)
    if status != 200:
        assert reply["error"]["code"] != "internal_error" and len(reply["error"]["message"]) < 1000


@pytest.mark.parametrize("schema", HOSTILE, ids=range(len(HOSTILE)))
async def test_hostile_schemas_are_answered(schema: Any) -> None:
    async with running() as here:
        await ends(here, schema)
        assert (await here.chat())["choices"][0]["message"]["content"] == REPLY


_WORDS = st.sampled_from(
    ["a", "b", "type", "^a", "(?=x)", "[a-z]+", "(a|b)*", "x{2,500}", "", "#", "#/$defs/a", "date"]
)
_VALUES = (
    st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats(allow_nan=False, allow_infinity=False) | _WORDS
)
_KEYWORDS = st.sampled_from(
    [
        "type",
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "multipleOf",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "if",
        "then",
        "$ref",
        "$defs",
        "minProperties",
        "maxProperties",
        "propertyNames",
        "uniqueItems",
        "contains",
        "$anchor",
        "unevaluatedProperties",
    ]
)


def _schemas() -> st.SearchStrategy[Any]:
    types = st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null", "king"])
    return st.recursive(
        st.booleans() | st.fixed_dictionaries({"type": types}) | st.dictionaries(_KEYWORDS, _VALUES, max_size=3),
        lambda inner: st.dictionaries(
            _KEYWORDS,
            inner | st.lists(inner | _WORDS, max_size=4) | st.dictionaries(_WORDS, inner, max_size=4) | types | _VALUES,
            max_size=5,
        ),
        max_leaves=20,
    )


@given(schemas=st.lists(_schemas().filter(lambda schema: isinstance(schema, dict)), min_size=10, max_size=20))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_schema_is_answered(schemas: list[Any]) -> None:
    async def check() -> None:
        async with running(model={"context": 2048}) as here:
            for schema in schemas:
                await ends(here, schema)
                strict = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
                await ends(here, None, response_format=strict)

    asyncio.run(check())


@pytest.mark.parametrize(
    "grammar",
    [
        "start: start",
        "start: a\na: b\nb: a",
        "start: " + "(" * 500 + '"a"' + ")" * 500,
        "start: /(a{1000}){1000}/",
        'start: "a"{100000}',
        "start: %json " + "[" * 300,
        "root ::= " + "(" * 90 + '"a"' + ")*" * 90,
        "root ::= root",
        'root ::= "a" root | root root | ""',
        "start: \x00",
        "%%",
        "start: @body",
        "start: <[9999999]>",
        "start: <nothing>",
    ],
)
async def test_hostile_grammars_are_answered(grammar: str) -> None:
    async with running() as here:
        await ends(here, None, grammar=grammar)
        assert (await here.chat())["choices"][0]["message"]["content"] == REPLY
