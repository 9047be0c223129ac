"""/tokenize, /detokenize and /apply-template, in llama.cpp's form and in vLLM's."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest

from tests.support.http_server import running
from tests.support.scripted_model import BOS, END, START, TEMPLATE, THINK

USER = {"role": "user", "content": "hé"}
TEXT = "a<|im_start|>é<think>"
IDS = [97, START, 195, 169, THINK]
LITERAL = [97, *b"<|im_start|>", 195, 169, THINK]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"content": TEXT}, IDS),
        ({"content": TEXT, "parse_special": False}, LITERAL),
        ({"content": TEXT, "add_special": True}, [BOS, *IDS]),
        ({"content": "<|bos|>a", "add_special": True}, [BOS, 97]),
        ({"content": ["a", END, "b"]}, [97, END, 98]),
        ({"content": ""}, []),
        ({"prompt": TEXT}, [BOS, *IDS]),
        ({"prompt": TEXT, "add_special_tokens": False}, IDS),
    ],
)
async def test_texts(body: dict[str, Any], expected: list[int]) -> None:
    async with running(model={"add_bos": True}) as here:
        for path in ("/tokenize", "/v1/tokenize"):
            status, reply, _ = await here.post(path, body)
            assert status == 200, reply
            assert reply["tokens"] == expected
        if "prompt" in body:
            assert (reply["count"], reply["max_model_len"], reply["token_strs"]) == (len(expected), 512, None)
        else:
            assert set(reply) == {"tokens"}


async def test_pieces_are_texts_or_bytes() -> None:
    async with running() as here:
        _, reply, _ = await here.post("/tokenize", {"content": TEXT, "with_pieces": True})
        assert reply["tokens"] == [
            {"id": 97, "piece": "a"},
            {"id": START, "piece": "<|im_start|>"},
            {"id": 195, "piece": [195]},
            {"id": 169, "piece": [169]},
            {"id": THINK, "piece": "<think>"},
        ]
        # The spelling of GPT-2's vocabulary: a space is U+0120.
        _, reply, _ = await here.post("/tokenize", {"prompt": " a<|im_end|>", "return_token_strs": True})
        assert reply["token_strs"] == ["\u0120", "a", "<|im_end|>"]


async def test_a_chat_has_the_tokens_and_the_text_of_its_prompt() -> None:
    async with running() as here:
        for fields in (
            {"messages": [USER]},
            {"messages": [USER], "add_generation_prompt": False},
            {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}},
            {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]},
            {"messages": [USER, {"role": "assistant", "content": "Yes"}], "continue_final_message": True},
            {"messages": [{"role": "user", "content": "<|im_end|>"}]},
        ):
            chat = await here.post("/v1/chat/completions", {**fields, "max_tokens": 1, "return_token_ids": True})
            assert chat[0] == 200, chat
            _, reply, _ = await here.post("/tokenize", {**fields, "model": "m"})
            assert reply["tokens"] == chat[1]["prompt_token_ids"]
            status, text, _ = await here.post("/apply-template", fields)
            assert status == 200
            _, back, _ = await here.post("/detokenize", {"tokens": reply["tokens"]})
            assert back == {"content": text["prompt"], "prompt": text["prompt"]}


async def test_the_text_is_what_the_template_writes() -> None:
    async with running() as here:
        messages = [{"role": "system", "content": "s"}, USER]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        for path in ("/apply-template", "/v1/apply-template"):
            _, reply, _ = await here.post(path, {"messages": messages, "tools": tools})
            environment = jinja2.Environment()
            environment.filters["tojson"] = json.dumps
            template = environment.from_string(TEMPLATE)
            assert reply["prompt"] == template.render(messages=messages, tools=tools, add_generation_prompt=True)


async def test_a_refusal_stands_for_the_content_of_an_assistant() -> None:
    async with running() as here:
        prompts = []
        for said in ({"content": None, "refusal": "No."}, {"refusal": "No."}, {"content": "No.", "refusal": None}):
            messages = [USER, {"role": "assistant", **said}, USER]
            _, reply, _ = await here.post("/apply-template", {"messages": messages})
            prompts.append(reply["prompt"])
        assert "No." in prompts[0] and len(set(prompts)) == 1


async def test_detokenizing() -> None:
    async with running() as here:
        for path in ("/detokenize", "/v1/detokenize"):
            _, reply, _ = await here.post(path, {"tokens": [*IDS, 195]})
            assert reply["content"] == TEXT + "\ufffd"
        assert (await here.post("/detokenize", {"tokens": []}))[1]["content"] == ""


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "content", "invalid_value"),
        ("/tokenize", {"content": "a", "prompt": "a"}, "prompt", "invalid_value"),
        ("/tokenize", {"content": 1}, "content", "invalid_value"),
        ("/tokenize", {"content": ["a", True]}, "content[1]", "invalid_value"),
        ("/tokenize", {"content": [261]}, "content", "invalid_value"),
        ("/tokenize", {"content": ["a", -1]}, "content", "invalid_value"),
        ("/tokenize", {"content": "a", "with_pieces": 1}, "with_pieces", "invalid_value"),
        ("/tokenize", {"content": "a", "return_token_strs": True}, "return_token_strs", "invalid_value"),
        ("/tokenize", {"prompt": "a", "with_pieces": True}, "with_pieces", "invalid_value"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, "add_special_tokens", "invalid_value"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        ("/tokenize", {"content": "a" * 40_000}, None, "context_length_exceeded"),
        ("/tokenize", {"prompt": "a" * 40_000}, None, "context_length_exceeded"),
        ("/detokenize", {}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [261]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "invalid_value"),
        ("/detokenize", {"tokens": [97] * 40_000}, None, "context_length_exceeded"),
        ("/apply-template", {}, "messages", "invalid_value"),
        ("/apply-template", {"messages": [USER], "tools": [{}]}, "tools[0].type", "invalid_value"),
    ],
)
async def test_what_is_refused(path: str, body: dict[str, Any], param: str | None, code: str) -> None:
    async with running() as here:
        status, reply, _ = await here.post(path, body)
        assert (status, reply["error"]["param"], reply["error"]["code"]) == (400, param, code)


async def test_they_need_no_shard_and_no_slot() -> None:
    async with running() as here:
        here.model.gone = "cpu:1: gone"
        assert (await here.post("/v1/completions", {"prompt": "a"}))[0] == 503
        for path, body in (
            ("/tokenize", {"content": "a"}),
            ("/detokenize", {"tokens": [97]}),
            ("/apply-template", {"messages": [USER]}),
        ):
            assert (await here.post(path, body))[0] == 200
        assert here.model.engine.stats().prompt_tokens == 0


async def test_they_count_and_check_as_other_endpoints_do() -> None:
    key = {"Authorization": "Bearer k"}
    async with running(api_key=("k",), strict_model=True) as here:
        for path, body in (
            ("/tokenize", {"content": "a"}),
            ("/detokenize", {"tokens": [97]}),
            ("/apply-template", {"messages": [USER]}),
        ):
            assert (await here.post(path, body))[0] == 401
            text = {**key, "Content-Type": "text/plain"}
            async with here.client.post(here.url + path, data=b"{}", headers=text) as response:
                assert response.status == 415
            status, reply, _ = await here.post(path, {**body, "model": "other"}, headers=key)
            assert (status, reply["error"]["code"]) == (404, "model_not_found")
            assert (await here.post(path, {**body, "nonsense": 1}, headers=key))[0] == 200
        _, text, _ = await here.get("/metrics", headers=key)
        assert "luce_unknown_request_fields_total 3.0" in text
        assert 'luce_requests_total{endpoint="/tokenize",status="200"} 1.0' in text
    async with running(loaded=False) as here:
        status, reply, _ = await here.post("/tokenize", {"content": "a"})
        assert (status, reply["error"]["code"]) == (503, "loading")
