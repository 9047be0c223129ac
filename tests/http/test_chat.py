"""/v1/chat/completions: reply objects, streams, and every field that changes them."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from tests.support.http_server import Running, running
from tests.support.scripted_backend import Script
from tests.support.scripted_model import END, REPLY, THINK, THOUGHT, saying, tokenizer

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


async def test_a_reply_has_the_documented_shape() -> None:
    async with running() as here:
        status, body, headers = await here.post(CHAT, {**HI, "model": "whatever"})
        assert status == 200
        assert re.fullmatch(r"chatcmpl-[0-9A-Za-z]{24}", body["id"])
        assert body["object"] == "chat.completion" and body["model"] == "scripted"
        assert body["system_fingerprint"] == "luce-0.1.0-0123abcd"
        (choice,) = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": REPLY, "refusal": None}
        assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
        details = choice["finish_details"]
        assert details["cause"] == "eos" and details["stop"] is None and isinstance(details["seed"], int)
        prompt = len("<|user\nhi|>\n<|assistant\n") - 4
        assert prompt  # control tokens count once each
        expected = 1 + len("user\nhi") + 1 + 1 + 1 + len("assistant\n")
        produced = len(REPLY.encode()) + 1
        assert body["usage"]["prompt_tokens"] == expected
        assert body["usage"]["completion_tokens"] == produced
        assert body["usage"]["total_tokens"] == expected + produced
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        timings = body["timings"]
        assert timings["prompt_n"] == expected and timings["predicted_n"] == produced
        assert timings["prompt_ms"] > 0 and timings["predicted_ms"] > 0 and timings["queue_ms"] >= 0
        assert timings["prompt_per_token_ms"] == pytest.approx(timings["prompt_ms"] / expected, abs=1e-3)
        assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / produced, abs=1e-3)
        assert headers["server"].startswith("luce/") and int(headers["openai-processing-ms"]) >= 0


async def test_a_stream_has_the_text_of_the_whole_reply() -> None:
    async with running() as here:
        whole = await here.chat()
        events = await here.events(CHAT, {**HI, "stream_options": {"include_usage": True}})
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    *deltas, end, usage = events[1:]
    texts = [event["choices"][0]["delta"]["content"] for event in deltas]
    assert "".join(texts) == REPLY and all(texts) and "\ufffd" not in "".join(texts)
    assert end["choices"][0]["delta"] == {} and end["choices"][0]["finish_reason"] == "stop"
    assert all(event["choices"][0]["finish_reason"] is None for event in deltas)
    assert usage["choices"] == [] and all(event["usage"] is None for event in events[:-1])
    expected = {**whole["usage"], "prompt_tokens_details": {"cached_tokens": whole["usage"]["prompt_tokens"]}}
    assert usage["usage"] == expected


async def test_the_next_turn_computes_only_new_tokens() -> None:
    # On devices that work beside the host, that token may be computed too (luce.engine.overlap).
    async with running(model={"asynchronous": False}) as here:
        first = {"role": "user", "content": "Tell me. " * 20}
        reply = await here.chat(messages=[first])
        known = reply["usage"]["total_tokens"]
        turn = [first, {"role": "assistant", "content": REPLY}, {"role": "user", "content": "more"}]
        body = {"messages": turn, "temperature": 0, "return_progress": True, "stream_options": {"include_usage": True}}
        events = await here.events(CHAT, body)
        progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        # The last token of the reply ended it, and was not computed.
        assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": known - 1}
        assert events[-1]["timings"]["cache_n"] == known - 1
        assert events[-1]["timings"]["prompt_n"] == events[-1]["usage"]["prompt_tokens"] - known + 1
        assert {p["cache"] for p in progress} == {known - 1} and progress[0]["processed"] == known - 1
        assert await here.metric("luce_prefix_cache_hits_total") == 1
        _, text, _ = await here.get("/metrics")
        assert f'luce_prompt_tokens_total{{source="ram"}} {known - 1}.0' in text


async def test_the_next_turn_of_a_recurrent_model_begins_behind_the_reply() -> None:
    async with running(model={"recurrent": True, "asynchronous": False}) as here:
        first = {"role": "user", "content": "hi"}
        said = await here.chat(messages=[first], return_token_ids=True)
        ids = [*said["prompt_token_ids"], *said["choices"][0]["token_ids"]]
        turn = [first, {"role": "assistant", "content": REPLY}, {"role": "user", "content": "more"}]
        reply = await here.chat(messages=turn, return_token_ids=True)
        assert reply["prompt_token_ids"][: len(ids)] == ids
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == len(ids) - 1


async def test_continuous_usage_counts_the_tokens_so_far() -> None:
    async with running() as here:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await here.events(CHAT, {**HI, "return_token_ids": True, "n": 2, "stream_options": options})
    produced = 0
    for event in events[:-1]:
        produced += sum(len(choice.get("token_ids", ())) for choice in event["choices"])
        usage = event["usage"]
        assert usage["completion_tokens"] == produced
        assert usage["total_tokens"] == usage["prompt_tokens"] + produced
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == produced > 0
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1


async def test_no_usage_chunk_without_include_usage() -> None:
    async with running() as here:
        events = await here.events(CHAT, HI)
        assert all("usage" not in event and event["choices"] for event in events)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
async def test_token_limits_finish_with_length(field: str) -> None:
    async with running() as here:
        reply = await here.chat(**{field: 5})
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["choices"][0]["finish_details"]["cause"] == "length"
        assert reply["usage"]["completion_tokens"] == 5
        events = await here.events(CHAT, {**HI, field: 5})
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        # Five bytes of the reply: the sixth would have completed nothing.
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
        assert text == reply["choices"][0]["message"]["content"] == REPLY.encode()[:5].decode()


async def test_max_completion_tokens_wins() -> None:
    async with running() as here:
        assert (await here.chat(max_tokens=9, max_completion_tokens=3))["usage"]["completion_tokens"] == 3


async def test_a_limit_beyond_the_context_ends_at_the_context() -> None:
    async with running(model={"context": 64, "script": saying("x" * 9, end=False)}) as here:
        reply = await here.chat(max_tokens=32000)
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["choices"][0]["finish_details"]["cause"] == "context"
        assert reply["usage"]["total_tokens"] == 64


@pytest.mark.parametrize("stop", ["wör", ["zzz", "wör"]])
async def test_stop_strings_cut_the_text(stop: Any) -> None:
    async with running() as here:
        reply = await here.chat(stop=stop)
        assert reply["choices"][0]["message"]["content"] == "Héllo, "
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["choices"][0]["finish_details"] | {"seed": 0} == {
            "cause": "stop",
            "stop": "wör",
            "seed": 0,
            "close_kind": None,
            "thinking_tokens": 0,
            "content_tokens": len("Héllo, wör".encode()),
            "bad_calls": 0,
            "cut_call": False,
            "cache": {"tier": "none"},
        }
        events = await here.events(CHAT, {**HI, "stop": stop})
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "Héllo, "


async def test_text_that_was_held_back_is_streamed_at_the_end() -> None:
    async with running() as here:
        events = await here.events(CHAT, {**HI, "stop": "!!"})
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == REPLY
        assert events[-1]["choices"][0]["delta"] == {}


async def test_an_unfinished_character_becomes_a_replacement() -> None:
    async with running() as here:
        reply = await here.chat(max_tokens=2)
        assert reply["choices"][0]["message"]["content"] == "H\ufffd"


async def test_logprobs_come_with_their_tokens() -> None:
    async with running() as here:
        reply = await here.chat(logprobs=True, top_logprobs=5)
        content = reply["choices"][0]["logprobs"]["content"]
        assert len(content) == reply["usage"]["completion_tokens"]
        assert bytes(b for entry in content for b in entry["bytes"]).decode() == REPLY
        assert content[0]["token"] == "H" and content[-1]["token"] == "<|im_end|>"
        for entry in content:
            assert len(entry["top_logprobs"]) == 5
            assert entry["top_logprobs"][0] == {k: entry[k] for k in ("token", "logprob", "bytes")}
            assert 0 < sum(math.exp(top["logprob"]) for top in entry["top_logprobs"]) <= 1 + 1e-6
        events = await here.events(CHAT, {**HI, "logprobs": True, "top_logprobs": 5})
        streamed = [x for e in events for x in (e["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert streamed == content


async def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    async with running() as here:
        reply = await here.chat(logprobs=True, top_logprobs=3, max_tokens=1, logit_bias={str(ord("J")): 100})
        (entry,) = reply["choices"][0]["logprobs"]["content"]
        prompt = tokenizer_ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        logits = [float(x) for x in here.model.backend.logits(prompt)]
        total = math.log(sum(math.exp(x) for x in logits))
        assert entry["token"] == "J"
        assert entry["logprob"] == pytest.approx(logits[ord("J")] - total, abs=1e-4)
        best = sorted(range(len(logits)), key=lambda i: -logits[i])[:3]
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(
            [logits[i] - total for i in best], abs=1e-4
        )


def tokenizer_ids(text: str) -> list[int]:
    specials = {"<|im_start|>": 256, "<|im_end|>": 257}
    ids: list[int] = []
    for piece in re.split(r"(<\|im_start\|>|<\|im_end\|>)", text):
        ids += [specials[piece]] if piece in specials else list(piece.encode())
    return ids


async def test_logit_bias_bans_and_forces() -> None:
    async with running() as here:
        banned = await here.chat(logit_bias={str(ord("H")): -100}, max_tokens=1, return_token_ids=True)
        assert banned["choices"][0]["token_ids"] != [ord("H")]
        forced = await here.chat(logit_bias={str(ord("Q")): 100}, max_tokens=3)
        assert forced["choices"][0]["message"]["content"] == "QQQ"


async def test_a_seed_repeats_a_reply_and_is_reported() -> None:
    async with running(model={"script": lambda history: None}) as here:
        options = {"temperature": 2, "max_tokens": 20, "return_token_ids": True, "ignore_eos": True}
        first, second = [await here.chat(seed=7, **options) for _ in range(2)]
        assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
        assert first["choices"][0]["finish_details"]["seed"] == 7
        third = await here.chat(**options)
        again = await here.chat(seed=third["choices"][0]["finish_details"]["seed"], **options)
        assert again["choices"][0]["token_ids"] == third["choices"][0]["token_ids"]
        assert third["choices"][0]["token_ids"] != first["choices"][0]["token_ids"]
        await here.chat(seed=-1, **options)


@pytest.mark.parametrize("parallel, max_queue", [(4, 8), (1, 0)])
async def test_n_replies_with_different_seeds(parallel: int, max_queue: int) -> None:
    # With one slot and no queue the later replies follow the first one.
    async with running(parallel=parallel, max_queue=max_queue, model={"script": lambda history: None}) as here:
        options = {"temperature": 2, "max_tokens": 12, "return_token_ids": True, "ignore_eos": True, "seed": 3}
        reply = await here.chat(n=3, **options)
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        ids = [choice["token_ids"] for choice in reply["choices"]]
        assert len({tuple(i) for i in ids}) == 3
        assert ids[0] == (await here.chat(**options))["choices"][0]["token_ids"]
        assert reply["usage"]["completion_tokens"] == 36
        events = await here.events(CHAT, {**HI, **options, "n": 3})
        streamed: list[list[int]] = [[], [], []]
        for event in events:
            streamed[event["choices"][0]["index"]] += event["choices"][0].get("token_ids", [])
        assert streamed == ids
        assert sorted(e["choices"][0]["index"] for e in events if e["choices"][0]["finish_reason"]) == [0, 1, 2]


async def test_ignore_eos_and_min_tokens() -> None:
    async with running(model={"script": saying([END])}) as here:
        assert (await here.chat())["usage"]["completion_tokens"] == 1
        assert (await here.chat(ignore_eos=True, max_tokens=9))["usage"]["completion_tokens"] == 9
        reply = await here.chat(min_tokens=4, max_tokens=9, return_token_ids=True)
        assert END not in reply["choices"][0]["token_ids"][:4] and reply["usage"]["completion_tokens"] > 4


async def test_stop_token_ids() -> None:
    async with running() as here:
        reply = await here.chat(stop_token_ids=[ord(",")], return_token_ids=True)
        assert reply["choices"][0]["message"]["content"] == "Héllo"
        assert reply["choices"][0]["finish_details"]["stop"] == ord(",")
        assert reply["choices"][0]["token_ids"] == list("Héllo,".encode())
        assert reply["prompt_token_ids"][0] == 256


async def test_ids_of_the_prompt_are_at_the_top() -> None:
    async with running() as here:
        reply = await here.chat(return_token_ids=True, n=2)
        assert reply["prompt_token_ids"] == tokenizer_ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        assert all("prompt_token_ids" not in choice for choice in reply["choices"])
        events = await here.events(CHAT, {**HI, "return_token_ids": True, "n": 2})
        assert events[0]["prompt_token_ids"] == reply["prompt_token_ids"]
        assert all("prompt_token_ids" not in event for event in events[1:])
        assert "prompt_token_ids" not in await here.chat()


async def test_timings_per_token_and_progress() -> None:
    async with running(chunk=8) as here:
        events = await here.events(CHAT, {**HI, "timings_per_token": True, "return_progress": True})
        progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        total = progress[0]["total"]
        assert [p["processed"] for p in progress] == [*range(0, total, 8), total]
        assert {p["cache"] for p in progress} == {0}
        counts = [event["timings"]["predicted_n"] for event in events if "timings" in event]
        assert counts == sorted(counts) and counts[-1] >= len(REPLY)


# --- messages


async def prompt_text(here: Running, messages: list[dict[str, Any]], **fields: Any) -> str:
    """The prompt that the model saw, control tokens by name."""
    body = {"messages": messages, "max_tokens": 1, "temperature": 0, "return_token_ids": True, **fields}
    status, reply, _ = await here.post(CHAT, body)
    assert status == 200, reply
    names = {256: b"<|im_start|>", 257: b"<|im_end|>"}
    ids = reply["prompt_token_ids"]
    return b"".join(names.get(i) or bytes([i]) for i in ids).decode()


def turns(*pairs: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in pairs) + "<|im_start|>assistant\n"


async def test_roles_and_parts_reach_the_template() -> None:
    async with running() as here:
        messages = [
            {"role": "developer", "content": "a"},
            {"role": "system", "content": [{"type": "text", "text": "b"}]},
            {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "input_text", "text": "d"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
            {"role": "tool", "tool_call_id": "1", "content": {"x": [1, 2]}},
            {"role": "assistant"},
            {"role": "assistant", "content": ""},
        ]
        called = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        expected = [("system", "a\n\nb"), ("user", "cd"), ("assistant", called), ("tool", '{"x":[1,2]}')]
        assert await prompt_text(here, messages) == turns(*expected, ("assistant", ""), ("assistant", ""))


async def test_a_later_system_message_is_user_text_where_the_template_refuses_it() -> None:
    async with running() as here:
        messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
        assert await prompt_text(here, messages) == turns(("user", "a"), ("system", "b"))
        refusing = await prompt_text(here, messages, chat_template_kwargs={"strict": True})
        assert refusing == turns(("user", "a"), ("user", "System: b"))


async def test_control_tokens_in_content_are_text() -> None:
    async with running() as here:
        body = {**HI, "messages": [{"role": "user", "content": "<|im_end|>"}], "return_token_ids": True}
        _, reply, _ = await here.post(CHAT, {**body, "max_tokens": 1})
        assert reply["prompt_token_ids"].count(END) == 1


async def test_surrogates_and_nul_in_content() -> None:
    async with running() as here:
        content = rb"a\ud83d\u0000b\ud83d\ude00\\ud83d"
        raw = b'{"messages":[{"role":"user","content":"%s"}],"return_token_ids":true}' % content
        status, reply, _ = await here.post(CHAT, raw)
        assert status == 200
        text = bytes(i for i in reply["prompt_token_ids"] if i < 256).decode()
        assert text == "user\na\ufffdb\U0001f600\\ud83d\nassistant\n"


async def test_the_template_gets_the_tools_unless_the_choice_is_none() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    async with running() as here:
        hi = HI["messages"]
        shown = await prompt_text(here, hi, tools=tools, tool_choice="auto")
        assert shown.startswith('<|im_start|>tools\n[{"type": "function", "function": {"name": "f"}}')
        plain = turns(("user", "hi"))
        assert await prompt_text(here, hi, tools=tools, tool_choice="none") == plain
        assert await prompt_text(here, hi, tools=[], tool_choice="auto") == plain
        assert await prompt_text(here, hi, functions=[{"name": "f"}], function_call="none") == plain
        assert '"f"' in await prompt_text(here, hi, functions=[{"name": "f"}])
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tools[1]]}}
        # All are shown, so that prompts with another choice begin alike; only those may be called.
        assert await prompt_text(here, hi, tools=tools, tool_choice=allowed) == shown


async def test_sampling_aliases_and_ignored_fields_are_accepted() -> None:
    async with running() as here:
        await here.chat(repeat_penalty=1.1, rep_window=64, min_p=0.1, top_k=20, top_p=0.9, frequency_penalty=1)
        await here.chat(
            store=True,
            metadata={"a": "b"},
            service_tier="auto",
            user="u",
            parallel_tool_calls=False,
            response_format={"type": "text"},
            prefix_cache={"scope": "off"},
            modalities=["text"],
            prediction={"content": "x"},
            verbosity="low",
            safety_identifier="x",
            typical_p=1,
            priority=0,
            stream_options=None,
            stop=None,
            seed=None,
        )
        before = await here.metric("luce_unknown_request_fields_total")
        assert before == 0
        await here.chat(this_is_new=1, and_this={"deep": []})
        assert await here.metric("luce_unknown_request_fields_total") == 2


def test_the_byte_tokenizer_is_one() -> None:
    assert tokenizer().encode("é<|im_end|>", specials=True) == [0xC3, 0xA9, END]


_THOUGHTFUL = [THINK, *b"\nhm, hm\n", THOUGHT, *b"\n\nYes."]


@pytest.mark.parametrize(
    ("script", "fields"),
    [
        (saying(_THOUGHTFUL), {}),
        # The template opens the reasoning; the reply has only its end.
        (
            saying(_THOUGHTFUL[2:], marker="<|im_start|>assistant\n<think>\n"),
            {"chat_template_kwargs": {"enable_thinking": True}},
        ),
    ],
)
async def test_reasoning_is_separate_from_content(script: Script, fields: dict[str, Any]) -> None:
    async with running(model={"script": script}) as here:
        reply = await here.chat(**fields)
        message, details = reply["choices"][0]["message"], reply["choices"][0]["finish_details"]
        assert message["content"] == "Yes."
        assert message["reasoning_content"] == message["reasoning"] == "hm, hm"
        assert details["thinking_tokens"] == reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 6
        assert details["thinking_tokens"] + details["content_tokens"] == reply["usage"]["completion_tokens"]
        events = await here.events(CHAT, {**HI, **fields})
        deltas = [e["choices"][0]["delta"] for e in events]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm, hm"
        assert "".join(d.get("content", "") for d in deltas) == "Yes."
        assert not any(d.get("content") and d.get("reasoning_content") for d in deltas)


async def test_reasoning_that_does_not_end_is_no_content() -> None:
    async with running(model={"script": saying(_THOUGHTFUL)}) as here:
        message = (await here.chat(max_tokens=6))["choices"][0]["message"]
        assert message["content"] == "" and message["reasoning_content"] == "hm,"
