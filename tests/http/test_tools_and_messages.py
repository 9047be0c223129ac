"""Messages and tools that do not fit each other are refused by the name of the field."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.http_server import running

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}
INVALID, UNSUPPORTED = "invalid_value", "unsupported_parameter"


def allowing(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        *(({"tool_choice": choice}, "tool_choice", INVALID) for choice in ("required", NAMED, allowing("f"))),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", INVALID),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", INVALID),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", INVALID),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", INVALID),
        ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice.type", INVALID),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", INVALID),
        ({"tools": [TOOL], "tool_choice": allowing("f", "g")}, "tool_choice", INVALID),
        ({"tools": [TOOL], "tool_choice": allowing(mode="required")}, "tool_choice.allowed_tools.tools", INVALID),
        ({"function_call": {"name": "f"}}, "function_call", INVALID),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call", INVALID),
        ({"functions": [{"parameters": {}}]}, "functions[0].name", INVALID),
        ({"tools": [{"type": "function"}]}, "tools[0].function", INVALID),
        ({"tools": [TOOL, {"foo": 1}]}, "tools[1].type", INVALID),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", INVALID),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].function", INVALID),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", INVALID),
        *(
            ({"tools": [{"type": "function", "function": {"name": name}}]}, "tools[0].function.name", INVALID)
            for name in ("", "a b", " a", "a\n", "a\x7fb", 'a"', "a>b", "<a", "a{", "a(b)")
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
            INVALID,
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", INVALID),
        ({"messages": [USER, {"role": "user", "content": None}]}, "messages[1].content", INVALID),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", INVALID),
        ({"messages": [{"role": "system"}, USER]}, "messages[0].content", INVALID),
        ({"messages": [USER, {"role": "tool", "content": "1"}]}, "messages[1].tool_call_id", INVALID),
        ({"messages": [USER, {"role": "function", "content": "1"}]}, "messages[1].name", INVALID),
        *(
            (
                {"messages": [{"role": "assistant", "tool_calls": [{"id": id}]}, USER]},
                "messages[0].tool_calls[0].id",
                INVALID,
            )
            for id in (["a"], {"a": 1}, 1)
        ),
    ],
)
async def test_what_does_not_fit_is_refused(fields: dict[str, Any], param: str, code: str) -> None:
    async with running() as here:
        status, body, _ = await here.post(CHAT, {"messages": [USER], **fields})
        assert status == 400, body
        assert (body["error"]["param"], body["error"]["code"]) == (param, code)
        assert body["error"]["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": allowing("f")},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": None, "strict": True}}]},
        {"functions": [{"name": "f"}], "function_call": "auto"},
        *({"tools": [{"type": "function", "function": {"name": name}}]} for name in ("ä/b.c:d-e_1", "x" * 200)),
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [USER, {"role": "assistant"}, {"role": "tool", "tool_call_id": "1"}]},
    ],
)
async def test_what_fits_is_served(fields: dict[str, Any]) -> None:
    async with running() as here:
        status, body, _ = await here.post(CHAT, {"messages": [USER], "max_tokens": 1, **fields})
        assert status == 200, body


async def test_the_openai_client_names_the_field() -> None:
    async with running() as here, openai.AsyncOpenAI(api_key="k", base_url=here.url + "/v1") as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=[USER], tools=[{"type": "function"}])  # type: ignore[list-item,misc]
        assert caught.value.param == "tools[0].function"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=[{"role": "user"}])  # type: ignore[list-item,misc]
        assert caught.value.param == "messages[0].content"
