"""Where chat replies have their reasoning, and what `--compat` and `--reasoning-details` add, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.http_server import Running, running
from tests.support.scripted_agent import call, thinking_chat
from tests.support.scripted_model import saying

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "time"}}
ANSWER, CALL, CUT = "<think>Hm, well.</think>\n\nYes.", f"<think>Hm.</think>\n{call('time', {})}", "<think>Hm, well, no"
LEGACY = ("reasoning_content", "reasoning")


def thinking(said: str) -> dict[str, Any]:
    return {"chat": thinking_chat, "context": 2048, "script": saying(said)}


async def replies(here: Running, **fields: Any) -> list[tuple[str, str]]:
    """Content and reasoning of a reply, whole and streamed."""
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, **fields}
    status, reply, _ = await here.post(CHAT, body)
    assert status == 200, reply
    deltas = [chunk["choices"][0]["delta"] for chunk in await here.events(CHAT, body)]
    messages = [reply["choices"][0]["message"]], deltas
    for name in LEGACY:
        assert [bool(delta.get(name)) for delta in deltas] == [bool(delta.get(LEGACY[0])) for delta in deltas]
    return [
        ("".join(m.get("content") or "" for m in found), "".join(m.get(LEGACY[0]) or "" for m in found))
        for found in messages
    ]


@pytest.mark.parametrize(
    ("setting", "fields", "found"),
    [
        ("separate", {}, "separate"),
        ("inline", {}, "inline"),
        ("drop", {}, "drop"),
        ("drop", {"reasoning_format": "auto"}, "separate"),
        ("inline", {"reasoning_format": "deepseek", "separate_reasoning": False}, "separate"),
        ("separate", {"reasoning_format": "none"}, "inline"),
        ("separate", {"separate_reasoning": False}, "inline"),
        ("inline", {"separate_reasoning": True}, "separate"),
        ("separate", {"include_reasoning": False}, "drop"),
        ("inline", {"reasoning": {"exclude": True}}, "drop"),
        ("separate", {"reasoning": {"exclude": False}, "include_reasoning": True}, "separate"),
    ],
)
async def test_a_setting_or_a_field_says_where_reasoning_is(setting: str, fields: dict[str, Any], found: str) -> None:
    expected = {
        "separate": ("Yes.", "Hm, well."),
        "inline": ("<think>\nHm, well.\n</think>\n\nYes.", ""),
        "drop": ("Yes.", ""),
    }
    async with running(model=thinking(ANSWER), reasoning_format=setting) as here:
        assert await replies(here, **fields) == [expected[found]] * 2


async def test_reasoning_in_the_text_ends_before_a_call_and_stays_open_where_it_was_cut() -> None:
    for said, fields, content in (
        (CALL, {"tools": [TOOL]}, "<think>\nHm.\n</think>\n\n"),
        (CUT, {"max_tokens": 14}, "<think>\nHm, wel"),
    ):
        async with running(model=thinking(said), reasoning_format="inline") as here:
            assert await replies(here, **fields) == [(content, "")] * 2
            _, reply, _ = await here.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], **fields})
            choice = reply["choices"][0]
            # What is counted does not depend on where it is shown.
            assert choice["finish_details"]["thinking_tokens"] > 0
            assert len(choice["message"].get("tool_calls", [])) == (said == CALL)


async def test_details_are_added_where_a_setting_asks_for_them() -> None:
    for details in (True, False):
        async with running(model=thinking(ANSWER), reasoning_details=details) as here:
            message = (await here.chat())["choices"][0]["message"]
            assert message.get("reasoning_details") == (
                [{"type": "reasoning.text", "text": "Hm, well."}] if details else None
            )


async def test_a_response_keeps_its_reasoning_and_refuses_to_leave_it_out() -> None:
    async with running(model=thinking(ANSWER), reasoning_format="drop") as here:
        status, reply, _ = await here.post("/v1/responses", {"input": "hi"})
        assert status == 200 and [item["type"] for item in reply["output"]] == ["reasoning", "message"]
        status, body, _ = await here.post("/v1/responses", {"input": "hi", "reasoning": {"exclude": True}})
        assert status == 400 and body["error"]["param"] == "reasoning.exclude"
        status, body, _ = await here.post(
            "/v1/messages", {"model": "m", "max_tokens": 60, "messages": [{"role": "user", "content": "hi"}]}
        )
        assert status == 200 and [block["type"] for block in body["content"]] == ["thinking", "text"]


@pytest.mark.parametrize(
    ("compat", "choice", "reason"),
    [
        ((), NAMED, "tool_calls"),
        (("openai",), NAMED, "stop"),
        (("openai", "lucebox"), "required", "tool_calls"),
        (("openai",), "auto", "tool_calls"),
    ],
)
async def test_a_named_function_ends_as_openai_has_it(compat: tuple[str, ...], choice: Any, reason: str) -> None:
    async with running(model=thinking(CALL), compat=compat) as here:
        found = (await here.chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False))["choices"][0]
        assert found["finish_reason"] == reason and len(found["message"]["tool_calls"]) == 1


async def test_usage_has_lucebox_s_timings_where_a_setting_asks_for_them() -> None:
    async with running(compat=("lucebox",)) as here:
        usage = (await here.chat())["usage"]
        assert usage["timings"].keys() == {"prefill_ms", "decode_ms", "decode_tokens_per_sec"}
        assert all(value >= 0 for value in usage["timings"].values()) and usage["accept_rate"] == 0
    async with running(compat=("openai",)) as here:
        assert "timings" not in (await here.chat())["usage"]
