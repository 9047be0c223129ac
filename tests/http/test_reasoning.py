"""Whether the model reasons: efforts, `thinking`, and replies that continue a message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from luce.models.spec import Dialect
from luce.text.chat import ChatFormat
from luce.text.template import ChatTemplate
from tests.support.http_server import Running, running
from tests.support.scripted_model import DIALECT, tokenizer
from tests.support.tool_templates import byte_tokenizer

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
USER = {"role": "user", "content": "hi"}
TURN = "<|im_start|>assistant\n"
_OPENING = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_start|>assistant\n"
#: how templates switch reasoning, by what they write behind `<|im_start|>assistant`
TEMPLATES = {
    "switch": _OPENING + "{% if enable_thinking is not false %}<think>\n{% endif %}",
    "switch and effort": _OPENING + "{{ reasoning_effort }}{% if thinking is true %}<think>{% endif %}",
    "effort": _OPENING + "{{ reasoning_effort }}",
    "always": _OPENING + "<think>\n",
    "ignores its switch": "{# thinking #}" + _OPENING + "<think>\n",
    "none": _OPENING,
}
UNSUPPORTED = "unsupported_parameter"
OFF: list[tuple[str, dict[str, Any]]] = [
    ("reasoning_effort", {"reasoning_effort": "none"}),
    ("thinking.type", {"thinking": {"type": "disabled"}}),
    ("thinking.type", {"thinking": {"type": "disabled"}, "reasoning": {"effort": "high"}}),
    ("reasoning.effort", {"reasoning": {"effort": "none"}, "thinking": {"type": "enabled"}}),
    ("reasoning.enabled", {"reasoning": {"enabled": False}}),
    ("chat_template_kwargs.enable_thinking", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("reasoning_effort", {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}),
]
ON: list[tuple[str, dict[str, Any]]] = [
    *(("reasoning_effort", {"reasoning_effort": effort}) for effort in ("minimal", "low", "high", "xhigh", "max")),
    ("thinking.type", {"thinking": {"type": "enabled"}}),
    ("reasoning.effort", {"reasoning": {"effort": "medium"}}),
    ("reasoning.enabled", {"reasoning": {"enabled": True}}),
    ("reasoning.max_tokens", {"reasoning": {"max_tokens": 5}}),
]


Chats = dict[str, ChatFormat]


@pytest.fixture(scope="module")
def chats() -> Iterator[Chats]:
    """A format with each template; `none` is that of a family without reasoning."""
    templates = {name: ChatTemplate(source) for name, source in TEMPLATES.items()}
    dialects = {name: Dialect() if name == "none" else DIALECT for name in TEMPLATES}
    yield {name: ChatFormat(template, tokenizer(), dialects[name]) for name, template in templates.items()}
    for template in templates.values():
        template.close()


@pytest.fixture(scope="module")
def spelled() -> Iterator[Chats]:
    """Formats whose vocabulary spells the markers of reasoning in other tokens."""
    templates = {name: ChatTemplate(TEMPLATES[name]) for name in ("always", "switch", "none")}
    yield {name: ChatFormat(template, byte_tokenizer("hermes"), DIALECT) for name, template in templates.items()}
    for template in templates.values():
        template.close()


@pytest.fixture
async def here() -> AsyncIterator[Running]:
    async with running() as here:
        yield here


async def behind_the_turn(here: Running, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What the template wrote behind the opened turn; or the error."""
    body = {"messages": [USER], "max_tokens": 1, "temperature": 0, "return_token_ids": True, **fields}
    status, reply, _ = await here.post(CHAT, body)
    if status == 400:
        return "", reply["error"]
    assert status == 200, reply
    names = {256: b"<|im_start|>", 257: b"<|im_end|>", 259: b"<think>", 260: b"</think>"}
    prompt = b"".join(names.get(i) or bytes([i]) for i in reply["prompt_token_ids"]).decode()
    return prompt.partition(TURN)[2], {}


@pytest.mark.parametrize(("param", "fields"), OFF)
async def test_off_is_off_or_refused(here: Running, chats: Chats, param: str, fields: dict[str, Any]) -> None:
    for name in TEMPLATES:
        here.model.chat = chats[name]
        written, error = await behind_the_turn(here, fields)
        if name in ("effort", "always", "ignores its switch"):
            assert (error["param"], error["code"]) == (param, UNSUPPORTED), name
            assert error["message"].startswith(f"{param}: ")
        else:
            assert not error and "<think>" not in written, (name, error)


@pytest.mark.parametrize(("param", "fields"), ON)
async def test_on_is_on_or_refused(here: Running, chats: Chats, param: str, fields: dict[str, Any]) -> None:
    effort = fields.get("reasoning_effort") or fields.get("reasoning", {}).get("effort") or ""
    for name in TEMPLATES:
        here.model.chat = chats[name]
        written, error = await behind_the_turn(here, fields)
        if name == "none":
            assert (error["param"], error["code"]) == (param, UNSUPPORTED)
        else:
            assert not error and ("<think>" in written) == (name != "effort"), name
            assert written.startswith(effort if "effort" in name else "<think>")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens", "invalid_value"),
        ({"thinking": {"type": "enabled", "reply_budget": "9"}}, "thinking.reply_budget", "invalid_value"),
        ({"reasoning": {"max_tokens": 9.5}}, "reasoning.max_tokens", "invalid_value"),
        ({"thinking_token_budget": -2}, "thinking_token_budget", "invalid_value"),
        ({"thinking_budget_tokens": "9"}, "thinking_budget_tokens", "invalid_value"),
        ({"custom_params": {"thinking_budget": True}}, "custom_params.thinking_budget", "invalid_value"),
        (
            {"chat_template_kwargs": {"thinking_budget": "low"}},
            "chat_template_kwargs.thinking_budget",
            "invalid_value",
        ),
        ({"reasoning": {"exclude": "yes"}}, "reasoning.exclude", "invalid_value"),
        ({"reasoning_format": "deepseek-legacy"}, "reasoning_format", "invalid_value"),
        ({"separate_reasoning": 1}, "separate_reasoning", "invalid_value"),
        ({"include_reasoning": "no"}, "include_reasoning", "invalid_value"),
        ({"reasoning_effort": "3"}, "reasoning_effort", "invalid_value"),
        ({"reasoning_effort": 3}, "reasoning_effort", "invalid_value"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
        ({"thinking": {}}, "thinking", "invalid_value"),
        ({"thinking": {"type": "maybe"}}, "thinking.type", "invalid_value"),
        ({"thinking": True}, "thinking", "invalid_value"),
    ],
)
async def test_what_is_not_known_is_refused(here: Running, fields: dict[str, Any], param: str, code: str) -> None:
    _, error = await behind_the_turn(here, fields)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_a_format_needs_a_token_that_ends_the_reasoning(
    here: Running, spelled: Chats, fields: dict[str, Any], param: str
) -> None:
    for name, asks in (("always", {}), ("switch", {}), ("switch", {"reasoning_effort": "none"}), ("none", {})):
        here.model.chat = spelled[name]
        status, reply, _ = await here.post(CHAT, {"messages": [USER], "max_tokens": 8, **fields, **asks})
        refused = name in ("always", "switch") and not asks
        assert status == (400 if refused else 200), (name, reply)
        assert not refused or (reply["error"]["param"], reply["error"]["code"]) == (param, UNSUPPORTED)


async def test_the_model_decides_where_nothing_is_asked(here: Running, chats: Chats) -> None:
    for name in TEMPLATES:
        here.model.chat = chats[name]
        for fields in ({}, {"reasoning": {"summary": "auto"}}, {"reasoning": None, "thinking": None}):
            written, error = await behind_the_turn(here, fields)
            assert not error and ("<think>" in written) == (name in ("switch", "always", "ignores its switch"))
        assert not (await behind_the_turn(here, {"thinking": {"type": "adaptive"}}))[1]


@pytest.mark.parametrize("mode", ["on", "off"])
async def test_the_server_may_decide_where_nothing_is_asked(chats: Chats, mode: str) -> None:
    able = ("switch", "switch and effort")
    async with running(reasoning=mode) as here:
        assert (await here.get("/props"))[1]["reasoning"]["default"] == mode
        for name in able:
            here.model.chat = chats[name]
            for fields in ({}, {"reasoning": {"summary": "auto"}}, {"chat_template_kwargs": {"other": 1}}):
                written, error = await behind_the_turn(here, fields)
                assert not error and ("<think>" in written) == (mode == "on"), name
            prompt = (await here.post("/apply-template", {"messages": [USER]}))[1]["prompt"]
            assert ("<think>" in prompt) == (mode == "on")
            # What a request says holds, however it says it.
            for says, fields in (
                ("on", {"reasoning_effort": "low"}),
                ("on", {"thinking": {"type": "enabled"}}),
                ("on", {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
                ("off", {"reasoning_effort": "none"}),
                ("off", {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
            ):
                written, error = await behind_the_turn(here, fields)
                assert not error and ("<think>" in written) == (says == "on"), (name, fields)
        # A budget is no word on whether to reason, and limits what the template begins.
        here.model.chat = chats["switch"]
        assert "<think>" in (await behind_the_turn(here, {"thinking_token_budget": 5}))[0]


async def test_spellings_of_an_effort(here: Running, chats: Chats) -> None:
    here.model.chat = chats["effort"]
    for spelled in ("xhigh", "x-high", "extra_high"):
        assert (await behind_the_turn(here, {"reasoning_effort": spelled}))[0] == "xhigh"
    # A variable of the template that the request sets itself stays.
    kwargs = {"chat_template_kwargs": {"reasoning_effort": "own"}}
    assert (await behind_the_turn(here, {"reasoning_effort": "low", **kwargs}))[0] == "own"


async def test_adaptive_reasons_with_a_high_effort(here: Running, chats: Chats) -> None:
    here.model.chat = chats["effort"]
    assert (await behind_the_turn(here, {"thinking": {"type": "adaptive"}}))[0] == "high"
    low = {"thinking": {"type": "adaptive"}, "reasoning_effort": "low"}
    assert (await behind_the_turn(here, low))[0] == "low"


async def test_a_reply_continues_a_message(here: Running) -> None:
    messages = [USER, {"role": "assistant", "content": "Héllo, "}]
    for fields in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": None}):
        written, error = await behind_the_turn(here, {"messages": messages, "continue_final_message": True, **fields})
        assert not error and written == "Héllo, "
    for fields in ({}, {"continue_final_message": False}, {"add_generation_prompt": True}):
        written, _ = await behind_the_turn(here, {"messages": messages, **fields})
        assert written == f"Héllo, <|im_end|>\n{TURN}"
    written, _ = await behind_the_turn(here, {"messages": messages, "add_generation_prompt": False})
    assert written == "Héllo, <|im_end|>\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True, "add_generation_prompt": True},
        {"continue_final_message": True},
        {
            "messages": [USER, {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}],
            "continue_final_message": True,
        },
    ],
)
async def test_what_cannot_be_continued(here: Running, fields: dict[str, Any]) -> None:
    _, error = await behind_the_turn(here, fields)
    assert (error["param"], error["code"]) == ("continue_final_message", "invalid_value")


async def test_the_openai_client(here: Running, chats: Chats) -> None:
    async with openai.AsyncOpenAI(api_key="k", base_url=here.url + "/v1") as client:
        create = client.chat.completions.create
        here.model.chat = chats["switch"]
        await create(model="m", messages=[USER], reasoning_effort="none", max_tokens=1)  # type: ignore[list-item]
        here.model.chat = chats["always"]
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model="m", messages=[USER], reasoning_effort="none")  # type: ignore[list-item]
        assert caught.value.param == "reasoning_effort"
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model="m", messages=[USER], extra_body={"priority": 2})  # type: ignore[list-item]
        assert caught.value.param == "priority"
