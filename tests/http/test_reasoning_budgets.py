"""Budgets of the reasoning: each field of each API, streamed and whole, and the settings of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import openai
import pytest

from luce.draft.ngram import NgramDrafter
from luce.models.spec import Dialect, ReasoningBudget
from luce.text.chat import ChatFormat
from luce.text.template import ChatTemplate
from tests.support.http_server import Running, running
from tests.support.lazy import Lazy
from tests.support.messages_stream import joined, streamed
from tests.support.scripted_backend import Script
from tests.support.scripted_model import DIALECT, END, START, TEMPLATE, THINK, THOUGHT, tokenizer

anthropic = Lazy("anthropic")

Json = dict[str, Any]

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
USER: Json = {"role": "user", "content": "hi"}
ON: Json = {"chat_template_kwargs": {"enable_thinking": True}}
UNSUPPORTED = "unsupported_parameter"


def thinker(length: int | None = None, *, opens: bool = False) -> Script:
    """Reasons in letters `a`, `length` of them or for ever, and answers "Yes."; `opens`: it opens the reasoning."""

    def script(history: Sequence[int]) -> int | None:
        begin = len(history) - list(history)[::-1].index(START) + len("assistant\n")
        reply = list(history[begin:])
        if THINK not in reply:
            return THINK if opens else ord("?")
        if THOUGHT in reply:
            said = len(reply) - 1 - reply.index(THOUGHT)
            return (*b"\n\nYes.", END)[min(said, 6)]
        thought = len(reply) - 1 - reply.index(THINK) - (not opens)
        return THOUGHT if thought == length else ord("a")

    return script


@pytest.fixture
async def here() -> AsyncIterator[Running]:
    async with running(model={"script": thinker(), "context": 2048}) as here:
        yield here


async def thought(here: Running, max_tokens: int | None = 1000, **fields: Any) -> tuple[int, str | None, str]:
    """Tokens of the reasoning, how it ended, and the content; a stream says the same."""
    body = {"messages": [USER], "temperature": 0, **fields}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    status, reply, _ = await here.post(CHAT, body)
    assert status == 200, reply
    choice, usage = reply["choices"][0], reply["usage"]
    message, details = choice["message"], choice["finish_details"]
    reasoning = message.get("reasoning_content", "")
    assert details["thinking_tokens"] == usage["completion_tokens_details"]["reasoning_tokens"] == reasoning.count("a")
    assert details["thinking_tokens"] + details["content_tokens"] == usage["completion_tokens"]
    events = await here.events(CHAT, {**body, "stream_options": {"include_usage": True}})
    streamed_usage = events[-1]["usage"]
    assert streamed_usage["completion_tokens_details"]["reasoning_tokens"] == details["thinking_tokens"]
    assert streamed_usage["completion_tokens"] == usage["completion_tokens"]
    chunks = [event["choices"][0] for event in events[:-1]]
    assert "".join(chunk["delta"].get("reasoning_content", "") for chunk in chunks) == reasoning
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == message["content"]
    assert chunks[-1]["finish_details"] | {"seed": 0, "cache": 0} == details | {"seed": 0, "cache": 0}
    return details["thinking_tokens"], details["close_kind"], message["content"]


def budget_fields(count: int) -> dict[str, Json]:
    """A budget in the spelling of each API."""
    return {
        "Anthropic": {"thinking": {"type": "enabled", "budget_tokens": count}},
        "OpenRouter": {"reasoning": {"max_tokens": count}},
        "vLLM": {"thinking_token_budget": count, **ON},
        "llama.cpp": {"thinking_budget_tokens": count, **ON},
        "SGLang": {"custom_params": {"thinking_budget": count}, **ON},
        "Qwen": {"chat_template_kwargs": {"enable_thinking": True, "thinking_budget": count}},
    }


@pytest.mark.parametrize("name", budget_fields(0))
@pytest.mark.parametrize("budget", [0, 1, 8])
async def test_every_spelling_of_a_budget(here: Running, name: str, budget: int) -> None:
    assert await thought(here, **budget_fields(budget)[name]) == (budget, "hard", "Yes.")


async def test_a_budget_that_is_not_used_up_changes_nothing() -> None:
    async with running(model={"script": thinker(5)}) as here:
        for name, fields in budget_fields(6).items():
            assert await thought(here, **fields) == (5, "natural", "Yes."), name
        assert await thought(here, **ON) == (5, "natural", "Yes.")
    async with running(model={"script": thinker(5, opens=True)}) as here:
        assert await thought(here, thinking_token_budget=5) == (5, "hard", "Yes.")
        assert await thought(here, thinking_token_budget=6) == (5, "natural", "Yes.")
        assert await thought(here, thinking_token_budget=-1, max_tokens=4) == (3, None, "")


async def test_the_smallest_budget_holds_and_wins_over_an_effort(here: Running) -> None:
    fields = {"thinking": {"type": "enabled", "budget_tokens": 9}, "reasoning": {"max_tokens": 4, "effort": "max"}}
    assert await thought(here, **fields) == (4, "hard", "Yes.")


async def test_off_leaves_no_reasoning() -> None:
    async with running(model={"script": thinker(opens=True)}) as here:
        for fields in ({"reasoning_effort": "none"}, {"thinking": {"type": "disabled", "budget_tokens": 5}}):
            assert await thought(here, **fields) == (0, "hard", "Yes.")


async def test_the_text_of_the_reply_has_its_share(here: Running) -> None:
    # Of 1000 tokens the reserve is half, one is the marker.
    assert await thought(here, reasoning_effort="high") == (499, "hard", "Yes.")
    assert await thought(here, thinking={"type": "enabled"}) == (499, "hard", "Yes.")
    assert await thought(here, thinking={"type": "enabled", "budget_tokens": 9999}) == (499, "hard", "Yes.")
    own = {"type": "enabled", "reply_budget": 7}
    assert await thought(here, thinking=own) == (992, "hard", "Yes.")
    assert await thought(here, 16, thinking=own | {"budget_tokens": 10}) == (8, "hard", "Yes.")
    assert await thought(here, 6, thinking=own) == (0, "hard", "Yes")
    # Nobody limits the reasoning: it may fill the reply.
    assert await thought(here, 20, **ON) == (20, None, "")
    # Without a limit of the reply, the context is one.
    prompt = len("<user\nhi>\n<assistant\n<\n")
    room = 2048 - prompt
    assert await thought(here, None, thinking={"type": "enabled"}) == (room - room // 2 - 1, "hard", "Yes.")


async def test_a_reply_that_owes_a_format_gets_to_it(here: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes"]}}}
    for fields, tokens in (({}, 50), ({"thinking_token_budget": 7}, 7), ({"thinking_token_budget": 99}, 49)):
        reply = await here.chat(response_format=form, max_tokens=100, **fields, **ON)
        message, details = reply["choices"][0]["message"], reply["choices"][0]["finish_details"]
        assert (details["thinking_tokens"], details["close_kind"]) == (min(tokens, 49), "hard")
        assert message["content"].strip() == '"yes"'


async def test_settings_of_the_server() -> None:
    settings = {"think_max_tokens": 30, "hard_limit_reply_budget": 5, "effort": (("low", 3), ("high", 12))}
    async with running(model={"script": thinker(), "context": 2048}, **settings) as here:
        assert await thought(here, **ON) == (30, "hard", "Yes.")
        assert await thought(here, 20, **ON) == (14, "hard", "Yes")
        assert await thought(here, reasoning_effort="low") == (3, "hard", "Yes.")
        assert await thought(here, reasoning={"effort": "high"}) == (12, "hard", "Yes.")
        assert await thought(here, thinking={"type": "adaptive"}) == (12, "hard", "Yes.")
        assert await thought(here, reasoning_effort="max") == (30, "hard", "Yes.")
        assert await thought(here, thinking={"type": "enabled", "budget_tokens": 99}) == (30, "hard", "Yes.")
        _, props, _ = await here.get("/props")
        tiers = {"minimal": 3, "low": 3, "medium": 12, "high": 12, "xhigh": 30, "max": 30}
        assert props["reasoning"] | {"supported_efforts": 0} == {
            "supported": True,
            "supported_efforts": 0,
            "think_max_tokens": 30,
            "hard_limit_reply_budget": 5,
            "effort_tiers": tiers,
            "default": "auto",
            "default_max_tokens": None,
        }
    async with running(model={"script": thinker(), "context": 2048}, think_max_tokens=0) as here:
        assert await thought(here, **ON) == (0, "hard", "Yes.")


async def test_a_server_that_turns_reasoning_off_ends_what_the_model_begins_all_the_same() -> None:
    model = {"script": thinker(opens=True), "context": 2048}
    async with running(model=model, reasoning="off") as here:
        assert await thought(here) == (0, "hard", "Yes.")
        assert await thought(here, thinking_token_budget=7) == (7, "hard", "Yes.")
    async with running(model=model) as here:
        assert await thought(here, 20) == (19, None, "")


async def test_several_replies_at_once_and_drafts() -> None:
    model = {"script": thinker(), "context": 2048, "drafter": NgramDrafter(block=7)}
    async with running(model=model, parallel=3, verify_width=8) as here:
        reply = await here.chat(n=3, seed=1, thinking_token_budget=40, max_tokens=200, **ON)
        for choice in reply["choices"]:
            assert choice["message"]["content"] == "Yes." and choice["finish_details"]["thinking_tokens"] == 40
        assert reply["timings"]["draft_n_accepted"] > 60
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 120


@pytest.mark.parametrize(
    ("thinking", "tokens"),
    [
        ({"type": "enabled", "budget_tokens": 8}, 8),
        ({"type": "adaptive"}, 499),
        ({"type": "adaptive", "display": "omitted"}, 499),
    ],
)
async def test_messages(here: Running, thinking: Json, tokens: int) -> None:
    body = {"model": "m", "max_tokens": 1000, "messages": [USER], "temperature": 0, "thinking": thinking}
    status, reply, _ = await here.post(MESSAGES, body)
    assert status == 200, reply
    block, text = reply["content"]
    assert text == {"type": "text", "text": "Yes."} and reply["stop_reason"] == "end_turn"
    assert block["thinking"] == ("" if "display" in thinking else "a" * tokens) and block["signature"]
    assert reply["usage"]["output_tokens_details"]["thinking_tokens"] == tokens
    assert reply["usage"]["output_tokens"] == tokens + len("</\n\nYes.$") - 1
    found = joined(await streamed(here, body))
    assert found["content"] == reply["content"]
    assert found["usage"]["output_tokens_details"] == reply["usage"]["output_tokens_details"]


async def test_the_anthropic_client(here: Running) -> None:
    async with anthropic.AsyncAnthropic(api_key="k", base_url=here.url) as client:
        reply = await client.messages.create(
            model="m",
            max_tokens=100,
            messages=[{"role": "user", "content": "hi"}],
            thinking={"type": "enabled", "budget_tokens": 5},
        )
    assert [block.type for block in reply.content] == ["thinking", "text"]


async def test_the_openai_client(here: Running) -> None:
    async with openai.AsyncOpenAI(api_key="k", base_url=here.url + "/v1") as client:
        create = client.chat.completions.create
        reply = await create(model="m", messages=[USER], reasoning_effort="low", max_tokens=100)  # type: ignore[list-item]
        assert reply.choices[0].message.content == "Yes."
        assert reply.usage and reply.usage.completion_tokens_details
        assert reply.usage.completion_tokens_details.reasoning_tokens == 49


@pytest.fixture(scope="module")
def asking() -> Iterator[tuple[ChatFormat, ChatFormat]]:
    """Formats with a template that knows budgets: with markers of reasoning, and without."""
    template = ChatTemplate(TEMPLATE + "{% if thinking_budget is defined %}[{{ thinking_budget }}]{% endif %}")
    yield ChatFormat(template, tokenizer(), DIALECT), ChatFormat(template, tokenizer(), Dialect())
    template.close()


async def test_a_template_that_knows_budgets_gets_them(asking: tuple[ChatFormat, ChatFormat]) -> None:
    async with running(model={"chat": lambda: asking[0]}) as here:
        body = {"messages": [USER], "max_tokens": 1, "return_token_ids": True}
        for fields, written in (({}, b"\n"), ({"thinking_token_budget": 7}, b"[7]")):
            _, reply, _ = await here.post(CHAT, {**body, **fields})
            assert bytes(reply["prompt_token_ids"][-len(written) :]) == written


async def test_a_model_without_markers_has_no_budgets(asking: tuple[ChatFormat, ChatFormat]) -> None:
    async with running(model={"chat": lambda: asking[1]}) as here:
        for param, fields in (
            ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 7}}),
            ("thinking_token_budget", {"thinking_token_budget": 7}),
        ):
            status, reply, _ = await here.post(CHAT, {"messages": [USER], **fields})
            assert status == 400
            assert (reply["error"]["param"], reply["error"]["code"]) == (param, UNSUPPORTED)
        assert (await here.chat(reasoning_effort="low"))["usage"]["completion_tokens"] > 1


async def test_a_model_card_limits_replies_without_a_limit_of_their_own() -> None:
    budget = ReasoningBudget(limit=7)
    async with running(model={"context": 2048, "budget": budget}) as here:
        reply = await here.chat(ignore_eos=True)
        assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (7, "length")
        assert (await here.chat(ignore_eos=True, max_tokens=9))["usage"]["completion_tokens"] == 9
        assert (await here.get("/props"))[1]["budget_envelope"]["default_max_tokens"] == 7
        # Codex takes a response that was cut for an error.
        body = {"input": "Hi", "ignore_eos": True}
        assert (await here.post("/v1/responses", body))[1]["usage"]["output_tokens"] > 1000
